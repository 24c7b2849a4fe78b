#!/usr/bin/env bash
# Certificates for a SuperLink, signed by an authority of its own, and a key pair for each SuperNode.
#
#   launch/flower/certificates.sh FOLDER HOST [HOST ...] [--nodes N] [--days DAYS]
#
# A HOST is a name or address by which SuperNodes reach the SuperLink. FOLDER gets ca.crt (for
# everybody), server.pem and server.key (for the SuperLink), node-K and node-K.pub (private for
# SuperNode K, public to register it), and ca.key, which signs: keep it away from the network.
set -euo pipefail

folder='' nodes=0 days=365 hosts=()
while (($#)); do
  case $1 in
    --nodes) nodes=${2:-} && shift $(($# > 1 ? 2 : 1)) ;;
    --days) days=${2:-} && shift $(($# > 1 ? 2 : 1)) ;;
    -*) folder='' && break ;;
    *) if [[ -z $folder ]]; then folder=$1; else hosts+=("$1"); fi && shift ;;
  esac
done
if [[ -z $folder || ${#hosts[@]} -eq 0 || ! $nodes =~ ^[0-9]+$ || ! $days =~ ^[1-9][0-9]*$ ]]; then
  sed -n '2,/^set/{/^# \{0,1\}/s///p}' "$0" >&2
  exit 2
fi
if [[ -e $folder/ca.key ]]; then
  echo "certificates.sh: $folder has certificates already: give another folder" >&2
  exit 2
fi
umask 077
mkdir -p "$folder"

names=''
for host in "${hosts[@]}"; do
  kind=DNS
  if [[ $host =~ ^[0-9.]+$ || $host == *:* ]]; then kind=IP; fi
  names+="${names:+,}$kind:$host"
done
curve=(-pkeyopt ec_paramgen_curve:P-384 -pkeyopt ec_param_enc:named_curve)
openssl genpkey -quiet -algorithm EC "${curve[@]}" -out "$folder/ca.key"
openssl req -x509 -new -key "$folder/ca.key" -sha384 -days "$days" -subj "/CN=fedjax_bn federation" \
  -addext basicConstraints=critical,CA:TRUE -addext keyUsage=critical,keyCertSign,cRLSign \
  -out "$folder/ca.crt"
openssl genpkey -quiet -algorithm EC "${curve[@]}" -out "$folder/server.key"
openssl req -new -key "$folder/server.key" -subj "/CN=${hosts[0]}" -out "$folder/server.csr"
printf '%s\n' "subjectAltName=$names" basicConstraints=critical,CA:FALSE \
  keyUsage=critical,digitalSignature extendedKeyUsage=serverAuth >"$folder/server.ext"
openssl x509 -req -in "$folder/server.csr" -CA "$folder/ca.crt" -CAkey "$folder/ca.key" \
  -CAcreateserial -sha384 -days "$days" -extfile "$folder/server.ext" -out "$folder/server.pem" \
  2>/dev/null
rm "$folder/server.csr" "$folder/server.ext"
for ((k = 0; k < nodes; k++)); do
  ssh-keygen -q -t ecdsa -b 384 -N '' -C "client $k" -f "$folder/node-$k"
done
