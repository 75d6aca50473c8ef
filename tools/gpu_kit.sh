#!/usr/bin/env bash
# Take vLLM and kvpool's dependencies to a GPU host that has no network, in parts, and run the check there.
#
#   tools/gpu_kit.sh pack PACK_PY OUT    here: pack with the given packer, kvpool's own dependencies beside vLLM
#   tools/gpu_kit.sh take PARTS          there, once for each part that has arrived below PARTS; unpacks when all are there
#   tools/gpu_kit.sh check [OPTIONS]     there: tools/gpu_check.py with the kit on its path
#
# Parts gather in /tmp/kvpool-kit-parts and unpack to /tmp/kvpool-kit. KIT_PARTS says how many there are (default 3).
set -euo pipefail
cd "$(dirname "$0")/.."

parts=/tmp/kvpool-kit-parts
kit=/tmp/kvpool-kit

case "${1:-}" in
pack)
    mkdir -p "$3"
    python3 "$2" "$3" --extra liburing==2026.3.30 posix_ipc==1.3.2
    ;;
take)
    mkdir -p "$parts"
    cp -r "$2"/part-* "$2"/unpack.sh "$parts"/
    have=$(find "$parts" -name 'kit.*' | wc -l)
    echo "parts: $have of ${KIT_PARTS:-3}"
    if [ "$have" -eq "${KIT_PARTS:-3}" ] && [ ! -d "$kit/slim" ]; then
        bash "$parts/unpack.sh" "$parts" "$kit"
    fi
    ;;
check)
    shift
    export PYTHONPATH="$kit/slim:$kit/site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
    export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
    ulimit -l unlimited 2>/dev/null || true
    exec python3 tools/gpu_check.py "$@"
    ;;
*)
    sed -n '2,9s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
