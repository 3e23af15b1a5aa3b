# Two commands do everything on a fresh Debian 12 or 13, or Ubuntu 24.04 or 26.04: `make train` and `make test`.
# `make test-all` goes on with what takes longer: wide loops, fuzzing, kill trials, the sanitizers.

# What `make train` learns: the King James Bible, in the public domain, a verse a line. DATA=path trains on other text.
TEXT = build/bible.txt
DATA ?= $(TEXT)
STEPS ?= 400
ifndef RUN
RUN := runs/$(shell date +%Y%m%d-%H%M%S)
endif
PACKAGES = g++ cmake ninja-build pkg-config libdnnl-dev libhwy-dev librandom123-dev libtomlplusplus-dev \
  nlohmann-json3-dev libcli11-dev libfmt-dev libxxhash-dev libgtest-dev libbenchmark-dev libopenmpi-dev \
  openmpi-bin libpcre2-dev libicu-dev libsentencepiece-dev zlib1g-dev libzstd-dev libcpp-httplib-dev bible-kjv
SUDO := $(if $(filter 0,$(shell id -u)),,sudo)

# Where `make install` puts everything.
PREFIX ?= /usr/local

.PHONY: train next test test-all build installable install deb page packages

# A small GPT on dp 2 x tp 2 x pp 2 with sequence parallelism, on 8 thread ranks.
train: build $(TEXT)
	build/release/echelon train --model llama-tiny --data $(DATA) --dp 2 --tp 2 --pp 2 --schedule 1f1b --steps $(STEPS) \
	  --global-batch 16 --micro-batch 2 --seq-len 256 --lr 5e-3 --eval-every 100 --sample 220 --checkpoint $(RUN)
	@$(MAKE) --no-print-directory next RUN=$(RUN)

define NEXT

What to try next:
  build/release/echelon generate --checkpoint $(RUN) --prompt "And God said"
  build/release/echelon verify --model llama-tiny --dp 2 --tp 2 --pp 2
  build/release/echelon plan --model llama-3-70b --machine h100 --gpus 64 --global-batch 512 --seq-len 8192 --explain
endef
export NEXT

next:
	@echo "$$NEXT"

$(TEXT): | packages
	@mkdir -p $(@D)
	bible -f gen1:1-rev22:21 </dev/null >$@.references
	sed 's/^[^ ]* //' $@.references >$@
	@rm $@.references

test: packages
	cmake --preset release
	cmake --build --preset release --target fast_tests
	ctest --preset fast

# Where the toolkit is, what is CUDA's is compiled too; where a device is, it runs. Without one for one architecture: the
# one that compiles every line.
NVCC := $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
CUDA_DEVICE := $(wildcard /dev/nvidia0)
CUDA_FLAGS := $(if $(CUDA_DEVICE),,-DCMAKE_CUDA_ARCHITECTURES=90a)

test-all: PACKAGES += ccache
test-all: test
	cmake --build --preset release
	ctest --preset slow
	$(if $(NVCC),CUDACXX=$(NVCC) cmake --preset cuda $(CUDA_FLAGS) && cmake --build --preset cuda,@echo "no nvcc: CUDA is not compiled")
	$(if $(NVCC),$(if $(CUDA_DEVICE),ctest --preset cuda,@echo "no GPU: what is CUDA's is compiled, and not run"))
	cmake --preset asan
	cmake --build --preset asan --target fast_tests
	ctest --preset asan
	cmake --preset tsan
	cmake --build --preset tsan --target thread_tests
	ctest --preset tsan

build: packages
	cmake --preset release
	cmake --build --preset release --target echelon

installable: packages
	cmake --preset release
	cmake --build --preset release --target installable

# Root, where it is needed, copies what its user has built; the list of that does not stay in the build as root's.
install: installable
	@if mkdir -p "$(DESTDIR)$(PREFIX)" 2>/dev/null && [ -w "$(DESTDIR)$(PREFIX)" ]; then \
	  cmake --install build/release --prefix "$(PREFIX)" >/dev/null; \
	else \
	  $(SUDO) env DESTDIR="$(DESTDIR)" cmake --install build/release --prefix "$(PREFIX)" >/dev/null && \
	  $(SUDO) rm -f build/release/install_manifest.txt; \
	fi
	@echo "installed into $(DESTDIR)$(PREFIX)"

deb: PACKAGES += dpkg-dev file
deb: installable
	cd build && cpack --config release/CPackConfig.cmake -B packages

# The planner in one page, build/page/echelon.html, which a browser opens as a file.
page: PACKAGES += emscripten
page: packages
	cmake --preset page
	cmake --build --preset page
	@echo "build/page/echelon.html"

# Installs what is missing, and asks for nothing where nothing is.
packages:
	@missing=$$(for p in $(PACKAGES); do \
	  dpkg-query -W -f='$${db:Status-Status}' $$p 2>/dev/null | grep -qx installed || echo $$p; done); \
	if [ -n "$$missing" ]; then \
	  echo "installing:" $$missing; \
	  $(SUDO) apt-get update -qq && \
	  $(SUDO) env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; \
	fi
