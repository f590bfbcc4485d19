# Sourced by build.sh: `test` and `bench`. Each suite is run to its end whatever the ones before it gave; the last line
# is the sum of all.

passed=0 failed=0 failures=()

# suite NAME COMMAND...: runs it with its output shown and kept, and adds its numbers to the sum.
suite() {
  local name=$1 log=$build/logs/$1.log rc counts began
  shift
  say "test: $name"
  mkdir -p "$build/logs"
  began=$(now_ms)
  set +e
  (set -eo pipefail; "$@") 2>&1 | tee "$log"
  rc=${PIPESTATUS[0]}
  set -e
  read -r -a counts <<<"$(node tests/tools/tally.mjs "$log" "$rc")"
  passed=$((passed + counts[0])) failed=$((failed + counts[1]))
  [ "${counts[1]}" -eq 0 ] || failures+=("$name (log in .build/logs/$name.log)")
  note "$name: ${counts[0]} passed, ${counts[1]} failed, $(seconds $(($(now_ms) - began)))"
}

# check NAME COMMAND...: something that is right or wrong as a whole, such as a linter; it counts as one test.
check() {
  local name=$1
  shift
  suite "$name" checked "$name" "$@"
}
checked() {
  local name=$1
  shift
  "$@"
  printf 'test result: ok. 1 passed; 0 failed (%s)\n' "$name"
}

native_lint() { native_cargo_run clippy --quiet --locked --profile checked --all-targets -- -D warnings; }
wasm_lint() { wasm_cargo_run "$1" clippy --quiet --locked --release --lib "${@:2}" -- -D warnings; }

native_tests() { native_cargo_run test --locked --profile checked ${full:+-- --include-ignored}; }

# Test files marked with wasm_bindgen_test, and the library's own unit tests when some are marked.
wasm_targets() {
  local file
  for file in tests/*.rs tests/*/main.rs; do
    [ -f "$file" ] || continue
    case $file in
      */main.rs) file=$(dirname "$file"); grep -rq wasm_bindgen_test "$file" && printf -- '--test\n%s\n' "$(basename "$file")" ;;
      *) ! grep -q wasm_bindgen_test "$file" || printf -- '--test\n%s\n' "$(basename "$file" .rs)" ;;
    esac
  done
  ! grep -rq wasm_bindgen_test src || printf -- '--lib\n'
}

# In headless Chromium through chromedriver, with the same compiled dependencies as the tier itself.
wasm_tests() {
  local tier=$1 targets
  mapfile -t targets < <(wasm_targets)
  [ ${#targets[@]} -gt 0 ] || { echo "no test is marked with wasm_bindgen_test"; return 1; }
  CHROMEDRIVER=$(command -v chromedriver) WASM_BINDGEN_USE_BROWSER=1 WASM_BINDGEN_TEST_TIMEOUT=600 \
    WASM_BINDGEN_TEST_WEBDRIVER_JSON="$root/tests/tools/webdriver.json" \
    CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_RUNNER="$build/tools/bin/wasm-bindgen-test-runner" \
    wasm_cargo_run "$tier" test --locked --release "${targets[@]}"
}

browser_tests() { node --test --test-concurrency=1 --test-timeout=3600000 --test-reporter=spec tests/browser/*.test.mjs; }

# The other toolchain route makes a threaded tier too, in its own folders.
other_route() {
  local other=debian
  [ "$route" = debian ] && other=rustup
  if [ "$other" = rustup ] && ! rustup_route; then note "rustup can add nothing on this machine: only Debian's route is tested"; return; fi
  (
    unset route
    QANDLE_TOOLCHAIN=$other choose_toolchain
    wasm_dir=$build/other-route
    compile_wasm relaxed_threads
    print_size relaxed_threads
  )
}

run_tests() {
  choose_toolchain
  need_chromium
  need_firefox
  need_command chromedriver chromium-driver
  [ "$native_cargo" != /usr/bin/cargo ] || need_packages rustfmt-web rust-web-clippy
  [ "$route" = rustup ] || need_packages rust-web-clippy
  need_model 0.5b
  [ -z "$full" ] || need_model 1.5b
  build_all "${all_tiers[@]}"
  export QANDLE_FULL=${full:+1}

  check format native_cargo_run fmt --check
  check clippy native_lint
  check clippy-wasm wasm_lint simd128
  check clippy-threads wasm_lint relaxed_threads --features threads
  check clippy-page wasm_lint page --no-default-features --features page
  check types-and-lint package_checks
  suite native native_tests
  suite wasm-simd128 wasm_tests simd128
  suite wasm-relaxed wasm_tests relaxed
  suite package npm --prefix pkg run --silent test
  suite browsers browser_tests
  [ -z "$full" ] || check other-toolchain other_route

  say "test: done in $(seconds $(($(now_ms) - began)))"
  for name in "${failures[@]}"; do note "failed: $name"; done
  echo
  echo "$passed passed, $failed failed"
  [ "$failed" -eq 0 ] || exit 1
  exit 0
}

package_checks() {
  npm --prefix pkg run --silent check
  npm --prefix pkg run --silent lint
  npm --prefix www run --silent check
  npm --prefix www run --silent lint
}

run_bench() {
  need_chromium
  need_model 0.5b
  build_all "${all_tiers[@]}"
  need_npm tests/bench
  local options=()
  [ -z "$quick" ] || options+=(--quick)
  [ -z "$rounds" ] || options+=(--rounds "$rounds")
  [ -z "$json" ] || options+=(--json "$json")
  node tests/bench/bench.mjs "${options[@]}"
}

run_loads() {
  need_chromium
  need_model 0.5b
  build_all "${all_tiers[@]}"
  need_npm tests/bench
  node tests/bench/load.mjs ${rounds:+--rounds "$rounds"} ${json:+--json "$json"}
}

# One build, which is enough for what compares an engine with itself.
build_relaxed() {
  need_chromium
  prepare_wasm
  local tier
  for tier in relaxed page; do build_wasm "$tier"; done
  build_package
}

run_caches() {
  need_chromium
  need_model 0.5b
  prepare_wasm
  local tier
  for tier in relaxed page; do build_wasm "$tier"; done
  build_package
  node tests/bench/caches.mjs ${rounds:+--rounds "$rounds"} ${json:+--json "$json"}
}

run_soak() {
  build_relaxed
  node tests/bench/soak.mjs ${requests:+--requests "$requests"} ${json:+--json "$json"}
}

run_workload() {
  need_model 0.5b
  build_relaxed
  node tests/bench/workload.mjs ${rounds:+--rounds "$rounds"} ${requests:+--requests "$requests"} ${json:+--json "$json"}
}

run_kernels() {
  need_chromium
  prepare_wasm
  local tier
  for tier in simd128 relaxed; do step "kernels $tier" compile_kernels "$tier"; done
  node tests/bench/kernels.mjs "$build/kernels" ${json:+--json "$json"}
}
