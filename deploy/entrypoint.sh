#!/bin/sh
# The image's entry point. As root it makes /data writable and then runs the server as the user 1000, which may only listen on
# ports below 1024. As another user (docker run --user) it runs the server as that user.
set -eu
if [ "$(id -u)" = 0 ]; then
  as_user="setpriv --reuid=1000 --regid=0 --clear-groups"
  if ! $as_user test -w /data; then
    chown -R 1000:0 /data || echo "lorikeet: /data cannot be made writable for the user 1000: models and adapters are not kept" >&2
  fi
  exec $as_user --inh-caps=-all,+net_bind_service --ambient-caps=-all,+net_bind_service lorikeet-launcher "$@"
fi
exec lorikeet-launcher "$@"
