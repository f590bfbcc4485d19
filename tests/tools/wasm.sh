# Sourced by build.sh: from the crate to the package's wasm files, one tier at a time: cargo, wasm-bindgen, wasm-opt, the
# glue's last touches, and the limits on size.

max_raw=5000000 max_gzip=1500000

# What wasm-opt may meet in every build.
wasm_features=(--enable-simd --enable-bulk-memory --enable-bulk-memory-opt --enable-mutable-globals --enable-sign-ext
  --enable-nontrapping-float-to-int --enable-reference-types --enable-multivalue)

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

source_hash() { hash_of "$toolchain_id" "$profile" "$@" -- src Cargo.toml Cargo.lock tests/tools/toolchain.sh tests/tools/wasm.sh tests/tools/glue.mjs tests/package-lock.json; }

# What every tier needs, once a run.
prepare_wasm() {
  choose_toolchain
  need_bindgen
  need_npm tests
}

build_wasm() {
  local tier=$1
  stamped "wasm-$tier" "$(source_hash "$tier")" "$wasm_dir/qandle_$tier.wasm" "wasm $tier ($profile)" compile_wasm "$tier"
  print_size "$tier"
}

compile_wasm() {
  local tier=$1 cargo_args=() features=("${wasm_features[@]}")
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

# The measured kernels as a module of their own, made as the tier is.
compile_kernels() {
  local tier=$1 features=("${wasm_features[@]}") out=$build/kernels built
  case $tier in relaxed*) features+=(--enable-relaxed-simd) ;; esac
  built=$(wasm_cargo_run "$tier" build --quiet --locked --release --bench kernels --message-format json |
    node -e 'const lines = require("node:fs").readFileSync(0, "utf8").split("\n").filter(Boolean).map(JSON.parse);
      console.log(lines.flatMap(({ target, filenames }) => (target?.name === "kernels" ? filenames : [])).find((name) => name.endsWith(".wasm")))')
  "$bindgen" --target web --no-typescript --out-name "kernels_$tier" --out-dir "$out" "$built"
  tests/node_modules/.bin/wasm-opt -O1 "${features[@]}" -o "$out/optimised.wasm" "$out/kernels_${tier}_bg.wasm"
  mv "$out/optimised.wasm" "$out/kernels_${tier}_bg.wasm"
}
