#!/usr/bin/env bash
# The pictures of the documentation, of a run of `lmtools quickstart`: the terminal and the report.
# Needs Chromium and tmux, and lmtools on the PATH. On a quiet machine: the picture shows how long it took.
#   docs/pictures/make.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chromium=$(command -v chromium || command -v chromium-browser || command -v google-chrome)
python "$here/record.py" "$folder" "$here/quickstart.svg"
"$chromium" --headless --no-sandbox --disable-gpu --hide-scrollbars --user-data-dir="$folder/chromium" \
  --blink-settings=preferredColorScheme=1 --window-size=1100,1560 \
  --screenshot="$here/report.png" "file://$folder/quickstart/report.html" 2> "$folder/log" ||
  { cat "$folder/log" >&2; exit 1; }
