# Shell functions that first_minute.sh and several_cards.sh share: each step runs under a limit of its own, and a step
# that fails does not stop the next.
#
#   --dry-run        on a machine without a GPU: with the fake libraries that `make test` builds
#   --wheels FOLDER  installs the wheels of a folder without a network, into a new folder: torch is not touched
set -uo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=${HERE%/tests/gpu}
DRY_RUN= WHEELS=
while [ $# -gt 0 ]; do
  case $1 in
    --dry-run) DRY_RUN=1 ;;
    --wheels) WHEELS=$2 && shift ;;
    *) echo "$0: unknown option $1; there are --dry-run and --wheels FOLDER" >&2 && exit 2 ;;
  esac
  shift
done
OUT=${OUT:-$(mktemp -d "${TMPDIR:-/tmp}/sirtaki-gpu-XXXXXX")}
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) && : >"$OUT/steps"
SITE=$(mktemp -d "${TMPDIR:-/tmp}/sirtaki-site-XXXXXX") && trap 'rm -rf "$SITE"' EXIT
export LC_ALL=C.UTF-8 PYTHONUNBUFFERED=1 PYTHONPATH=$SITE:$ROOT/tests:$HERE${PYTHONPATH:+:$PYTHONPATH}
export SIRTAKI_TEST_PATIENCE=${SIRTAKI_TEST_PATIENCE:-40}  # seconds in which a rank has to answer
export NCCL_DEBUG=${NCCL_DEBUG:-INFO} NCCL_DEBUG_FILE=${NCCL_DEBUG_FILE:-$OUT/nccl.%p.log}

if [ "$DRY_RUN" ]; then  # a busy machine without a GPU is slower than a lent one
  export SIRTAKI_TEST_PATIENCE=300 TORCH_TENSORS_ON_GPUS=${GPUS:-1}
  export CORE_TESTS=${CORE_TESTS:-$ROOT/build/core}
  export SIRTAKI_GPU_LIBRARIES=$CORE_TESTS/fake_gpu
fi
if [ "$WHEELS" ]; then
  python -m pip install --quiet --no-index --no-deps --target "$SITE" "$WHEELS"/*.whl || exit 2
fi

# step NAME LIMIT COMMAND...: runs a command for at most LIMIT seconds; its output is in $OUT/NAME.log.
step() {
  local name=$1 limit=$2 started=$EPOCHREALTIME code
  shift 2
  [ "$DRY_RUN" ] && limit=600
  echo "$name: at most $limit s"
  timeout -k 5 "$limit" "$@" >"$OUT/$name.log" 2>&1 </dev/null
  code=$?
  echo "$name $code $started $EPOCHREALTIME $limit" >>"$OUT/steps"
}

# ranks COUNT: the start of a command that runs a program on so many ranks.
ranks() { echo "python -m sirtaki.runner -np $1"; }

# cases EXPRESSION: runs the tests of test_on_gpus.py that match, also where the other tests' packages are missing.
CASES="python -m pytest -c $ROOT/pyproject.toml --confcutdir $HERE -p process_world -p no:cacheprovider -v -s"
CASES="$CASES $HERE/test_on_gpus.py -k"

# finish: prints the table of the steps, and ends with 1 if a step has failed.
finish() {
  python "$HERE/table.py" "$OUT"
  exit $?
}
