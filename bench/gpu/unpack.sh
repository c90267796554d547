#!/usr/bin/env bash
# Takes in one folder of pack.py's, or (--install) joins what has arrived and installs it into /tmp/site and /tmp/debs.
set -euo pipefail
store=/tmp/wheels
mkdir -p $store
if [[ $1 != --install ]]; then
  cp "$1"/* $store/
  exit
fi
cd $store
for first in *.whl.000; do
  [[ -e $first ]] || continue
  cat "${first%.000}".[0-9][0-9][0-9] >"${first%.000}"
  rm "${first%.000}".[0-9][0-9][0-9]
done
mkdir -p /tmp/debs
for deb in *.deb; do
  # Never onto /: libraries of another release break it.
  dpkg -x "$deb" /tmp/debs
done
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site ./*.whl
rm -rf $store
# Else the first start would measure the compiler; a few packages hold files of other Python versions.
python3 -m compileall -q -j 0 /tmp/site >/dev/null 2>&1 || true
echo "installed $(find /tmp/site -maxdepth 1 | wc -l) entries into /tmp/site"
