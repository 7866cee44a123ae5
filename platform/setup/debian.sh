# Sourced: fetches Debian or Ubuntu packages to be unpacked, not installed, so no service of the system's starts.

have_apt() { { command -v apt-get && command -v dpkg-deb; } >/dev/null; }

# fetch FOLDER PACKAGE...: the packages' files in FOLDER, with the lists of packages brought up to date if need be.
fetch() {
  local folder=$1 as_root=(); shift
  (cd "$folder" && apt-get download -qq "$@") >/dev/null 2>&1 && return
  if [ "$(id -u)" != 0 ]; then as_root=(sudo -n); fi
  "${as_root[@]}" apt-get update -qq >/dev/null 2>&1 && (cd "$folder" && apt-get download -qq "$@") >/dev/null 2>&1
}
