#!/usr/bin/env bash
# One training on all hosts of a Cloud TPU slice; JAX finds them by itself.
#
#   launch/tpu_vm.sh --name NAME --zone ZONE --wheel dist/fedjax_bn-VERSION-py3-none-any.whl
#   launch/tpu_vm.sh --name NAME --zone ZONE [--dry-run] --config pacs --workdir /mnt/shared/pacs
#
# The first installs the library on every host, the second trains. Run it in tmux: the training ends
# with the connection, and the same command continues from there.
set -euo pipefail

name='' zone='' wheel='' dry_run=false
while (($#)); do
  case $1 in
    --name) name=${2:-} && shift $(($# > 1 ? 2 : 1)) ;;
    --zone) zone=${2:-} && shift $(($# > 1 ? 2 : 1)) ;;
    --wheel) wheel=${2:-} && shift $(($# > 1 ? 2 : 1)) ;;
    --dry-run) dry_run=true && shift ;;
    *) break ;;
  esac
done
if [[ " $* " == *" --dry-run "* ]]; then
  echo "tpu_vm.sh: --dry-run belongs before the program's own arguments" >&2
  exit 2
fi
if [[ -z $name || -z $zone || -z $wheel$* ]]; then
  sed -n '2,/^set/{/^# \{0,1\}/s///p}' "$0" >&2
  exit 2
fi

on_all() {
  local command=(gcloud compute tpus tpu-vm "$@" "--zone=$zone" --worker=all)
  if $dry_run; then
    printf '%q ' "${command[@]}" && echo
  else
    "${command[@]}"
  fi
}
if [[ -n $wheel ]]; then
  on_all scp "$wheel" "$name:"
  on_all ssh "$name" --command="python3 -m pip install '$(basename "$wheel")[tpu]'"
fi
if (($#)); then
  on_all ssh "$name" --command="python3 -m fedjax_bn.main --distributed$(printf ' %q' "$@")"
fi
