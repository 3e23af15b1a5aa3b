#!/bin/sh
# The site of docs/ builds, without a broken link; and without mkdocs: its nav has every page. site.sh SOURCE PLACE ECHELON:
# PLACE is made anew.
# Exit status 77: cannot be tried here, and why.
set -eu
source=$1 place=$2 echelon=$3
cant() {
  echo "skipped: $1"
  exit 77
}
command -v python3 >/dev/null || cant "python3 is not installed"
rm -rf "$place"
mkdir -p "$place"
python3 "$source/site/make_pages.py" "$echelon" "$place"
command -v mkdocs >/dev/null || cant "mkdocs is not installed (pip install mkdocs-material)"
mkdocs --version | grep -qE 'version (1\.([6-9]|[1-9][0-9])|[2-9])' || cant "mkdocs is older than 1.6, which checks anchors"
# (Not --quiet: what is not logged does not count.)
build() { mkdocs build --strict --config-file "$place/mkdocs.yml" >"$place/said" 2>&1; }
build || {
  ! grep -q "Unrecognised theme name: 'material'" "$place/said" || cant "mkdocs-material is not installed"
  cat "$place/said"
  exit 1
}
grep -q -- '--global-batch' "$place/html/reference/echelon-train.html"
! grep -lE '(src|href)="https?://[^"]*\.(js|css|woff2?)"' "$place"/html/*.html  # nothing from the network

# A link to nowhere, and one to no such heading, are found.
cp "$place/pages/zero.md" "$place/zero.md"
for link in nowhere.md verify.md#nowhere; do
  cp "$place/zero.md" "$place/pages/zero.md"
  echo "[this]($link)" >>"$place/pages/zero.md"
  ! build || { echo "$link was not found to be broken"; exit 1; }
done
