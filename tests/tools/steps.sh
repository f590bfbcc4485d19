# Sourced by build.sh: steps that say what they do and how long they took, content stamps, and what is installed
# from the system when it is missing. Owns no knowledge of what is built.

say() { printf '\n==> %s\n' "$*"; }
note() { printf '    %s\n' "$*"; }
die() { printf '\nbuild.sh: %s\n' "$*" >&2; exit 1; }

now_ms() { date +%s%3N; }
seconds() { awk -v ms="$1" 'BEGIN { printf "%.1f s", ms / 1000 }'; }

# step WHAT COMMAND...: runs the command in a subshell with errexit, prints its time, ends the script when it fails.
step() {
  local what=$1 began rc
  shift
  say "$what"
  began=$(now_ms)
  set +e
  (set -e; "$@")
  rc=$?
  set -e
  [ "$rc" -eq 0 ] || die "failed after $(seconds $(($(now_ms) - began))): $what. The lines above say why; the same command goes on from here once that is mended."
  note "$what: $(seconds $(($(now_ms) - began)))"
}

# stamped NAME HASH OUTPUT WHAT COMMAND...: a step that is skipped while HASH is that of the last good run and OUTPUT exists.
stamped() {
  local stamp=$build/stamps/$1 hash=$2 output=$3 what=$4
  shift 4
  if [ -e "$output" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$hash" ]; then
    say "$what: unchanged"
    return
  fi
  rm -f "$stamp"
  step "$what" "$@"
  mkdir -p "$build/stamps"
  printf '%s' "$hash" >"$stamp"
}

# hash_of WORDS... -- PATHS...: one hash over the words and the contents of all files under the paths.
hash_of() {
  local words=()
  while [ $# -gt 0 ] && [ "$1" != -- ]; do words+=("$1"); shift; done
  shift || true
  { printf '%s\n' "${words[@]:-}"
    for path in "$@"; do
      [ ! -e "$path" ] || find "$path" -type d \( -name node_modules -o -name dist -o -name .build \) -prune -o -type f -print
    done | LC_ALL=C sort | xargs -r -d '\n' sha256sum
  } | sha256sum | cut -d' ' -f1
}

as_root() {
  if [ "$(id -u)" -eq 0 ]; then "$@"
  elif command -v sudo >/dev/null; then sudo "$@"
  else die "neither root nor sudo here; run as root: $*"
  fi
}

# need_packages PACKAGE...: Debian packages, installed when missing.
need_packages() {
  local missing=() package
  for package in "$@"; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
  done
  [ ${#missing[@]} -gt 0 ] || return 0
  command -v apt-get >/dev/null || die "please install what Debian calls: ${missing[*]}"
  note "installing ${missing[*]}"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >"$build/apt.log" 2>&1 ||
    { tail -n 20 "$build/apt.log" >&2; die "apt-get could not install: ${missing[*]}"; }
}

# need_command COMMAND PACKAGE: the package, unless the command is there whatever brought it.
need_command() { command -v "$1" >/dev/null || need_packages "$2"; }

first_command() { local name; for name in "$@"; do command -v "$name" && return; done; return 1; }

need_chromium() { first_command chromium chromium-browser google-chrome >/dev/null || need_packages chromium; }
need_firefox() { first_command firefox-esr firefox >/dev/null || need_packages firefox-esr; }

# need_npm FOLDER: the exact packages of its lock file, without running their scripts.
need_npm() {
  local folder=$1
  command -v npm >/dev/null || die "Node.js 20 or newer with npm is needed: install it, then run this again"
  stamped "npm-${folder//\//-}" "$(hash_of "$(node --version)" -- "$folder/package.json" "$folder/package-lock.json")" "$folder/node_modules" \
    "npm packages of $folder" npm_ci "$folder"
}
npm_ci() {
  local how=(ci)
  # The benchmark's peers name optional packages of other systems that a registry may lack; `ci` then refuses the lock file.
  [ "$1" != tests/bench ] || how=(install --no-save)
  npm --prefix "$1" "${how[@]}" --ignore-scripts --no-audit --no-fund --loglevel=error
}
