#!/usr/bin/env bash
# The pictures of the documentation, from what `lmtools quickstart` makes. Needs Chromium, and lmtools on the PATH.
#   docs/pictures/make.sh [FOLDER OF A QUICKSTART]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
made=${1:-$profile/quickstart}
[ -f "$made/report.html" ] || lmtools quickstart "$made"
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
"$chromium" --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$profile/chromium" \
  --blink-settings=preferredColorScheme=1 --window-size=1100,1560 \
  --screenshot="$here/report.png" "file://$(realpath "$made")/report.html" 2> "$profile/log" ||
  { cat "$profile/log" >&2; exit 1; }
