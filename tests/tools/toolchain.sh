# Sourced by build.sh: which Rust builds for wasm. Two routes: rustup's toolchain when it has, or can add, the wasm
# target and the standard library's source; else Debian's rustc-web. QANDLE_TOOLCHAIN=rustup|debian forces one.

wasm_target=wasm32-unknown-unknown

# Only what is installed counts when `rustup` cannot reach its server; it is asked for at most two minutes.
rustup_route() {
  command -v rustup >/dev/null || return 1
  local have
  have=$(rustup target list --installed 2>/dev/null; rustup component list --installed 2>/dev/null) || return 1
  grep -qx "$wasm_target" <<<"$have" || timeout 120 rustup target add "$wasm_target" >"$build/rustup.log" 2>&1 || return 1
  grep -qx rust-src <<<"$have" || timeout 120 rustup component add rust-src >>"$build/rustup.log" 2>&1 || return 1
}

# Debian's rust-lld is a link to lld of the same LLVM; an older lld links its objects as well.
debian_route() {
  need_packages rustc-web cargo-web rust-web-src rust-web-llvm
  [ -x /usr/bin/rust-lld ] || {
    local lld=lld-19
    ! apt-cache show lld-22 >/dev/null 2>&1 || lld=lld-22
    need_packages "$lld"
  }
  wasm_linker=$(first_command rust-lld wasm-ld-22 wasm-ld-19) || die "no linker for wasm: install Debian's lld-22 or lld-19"
}

# Sets route, wasm_rustc and wasm_cargo; native_cargo is the toolchain of the machine, Debian's where there is no other.
choose_toolchain() {
  [ -z "${route:-}" ] || return 0
  mkdir -p "$build"
  local wanted=${QANDLE_TOOLCHAIN:-}
  case $wanted in
    rustup) rustup_route || die "QANDLE_TOOLCHAIN=rustup, but rustup cannot add $wasm_target and rust-src: $(tail -n 1 "$build/rustup.log" 2>/dev/null)"; route=rustup ;;
    debian) debian_route; route=debian ;;
    '') if rustup_route; then route=rustup; else debian_route; route=debian; fi ;;
    *) die "QANDLE_TOOLCHAIN is '$wanted'; it can be rustup or debian" ;;
  esac
  if [ "$route" = rustup ]; then
    wasm_rustc=$(rustup which rustc) wasm_cargo=$(rustup which cargo)
  else
    wasm_rustc=/usr/bin/rustc wasm_cargo=/usr/bin/cargo
  fi
  if command -v rustup >/dev/null && native_cargo=$(rustup which cargo 2>/dev/null); then :
  else native_cargo=$(command -v cargo) || native_cargo=$wasm_cargo
  fi
  need_command cc gcc
  need_command ar binutils
  toolchain_id="$route $("$wasm_rustc" --version)"
  say "wasm toolchain: $toolchain_id"
}

# wasm_cargo_run TIER ARGS...: cargo for a wasm tier, with the tier's flags and its own target folder.
# Threads need a standard library built with atomics, on either route; Debian has no prebuilt one for wasm at all.
wasm_cargo_run() {
  local tier=$1 flags=() std=()
  shift
  case $tier in
    simd128*) flags=(-C target-feature=+simd128) ;;
    relaxed*) flags=(-C target-feature=+simd128,+relaxed-simd) ;;
    page) ;;
  esac
  case $tier in
    *_threads)
      flags+=(-C target-feature=+atomics,+bulk-memory,+mutable-globals
        -C link-arg=--shared-memory -C link-arg=--import-memory -C link-arg=--max-memory=4294967296
        -C link-arg=--export=__wasm_init_tls -C link-arg=--export=__tls_size -C link-arg=--export=__tls_align -C link-arg=--export=__tls_base)
      std=(-Z build-std=std,panic_abort) ;;
    *) [ "$route" = rustup ] || std=(-Z build-std=std,panic_abort) ;;
  esac
  # No folder of this machine ends up in a panic message of the built files.
  flags+=("--remap-path-prefix=$root=qandle" "--remap-path-prefix=${CARGO_HOME:-$HOME/.cargo}=cargo"
    "--remap-path-prefix=$(readlink -f "$("$wasm_rustc" --print sysroot)/lib/rustlib/src/rust")=rust")
  local command=$1 env=(RUSTC="$wasm_rustc" PATH="$(dirname "$wasm_cargo"):$PATH" CARGO_TARGET_DIR="$build/target/$route-$tier"
    CARGO_ENCODED_RUSTFLAGS="$(IFS=$'\x1f'; printf '%s' "${flags[*]}")")
  shift
  [ ${#std[@]} -eq 0 ] || env+=(RUSTC_BOOTSTRAP=1)
  [ "$route" = rustup ] || env+=(CARGO_TARGET_WASM32_UNKNOWN_UNKNOWN_LINKER="$wasm_linker")
  env "${env[@]}" "$wasm_cargo" "$command" --target "$wasm_target" "${std[@]}" "$@"
}

native_cargo_run() { env PATH="$(dirname "$native_cargo"):$PATH" CARGO_TARGET_DIR="$root/target" "$native_cargo" "$@"; }
