#!/bin/sh
# pip installs the package into a new environment, and its tests compare it with the program of this build.
# python_package.sh SOURCE BUILD_DIRECTORY ECHELON. Exit status 77: cannot be tried here, and why.
set -eu
source=$1 build=$2 echelon=$3
cant() {
  echo "skipped: $1"
  exit 77
}
command -v python3 >/dev/null || cant "python3 is not installed"
python3 -c 'import sys; sys.exit(sys.version_info < (3, 9))' || cant "python3 is older than 3.9"
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv" >/dev/null 2>&1 || cant "python3-venv is not installed"
pip="$place/venv/bin/python -m pip --disable-pip-version-check"
$pip download --quiet --no-deps --dest "$place" nanobind >/dev/null 2>&1 || cant "PyPI cannot be reached"
# Kept between runs, so that what has not changed is not made again.
$pip install --quiet --config-settings=build-dir="$build" "$source[test]"
cd "$place"  # where no folder of the source is found instead of what was installed
TMPDIR=$place ECHELON_BINARY=$echelon "$place/venv/bin/python" -m pytest -q -p no:cacheprovider --import-mode=importlib \
  --rootdir "$place" "$source/python/tests"
