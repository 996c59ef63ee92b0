#!/bin/sh
# The entry point of the image. As root it gives what root owns in /data to uid 1000, and goes on as uid 1000.
# As another user (--user) it changes nothing.
set -eu
become=
if [ "$(id -u)" = 0 ]; then
  become="setpriv --reuid=1000 --regid=1000 --keep-groups" # groups of --group-add stay
  if ! $become true; then
    echo "The container runs as root and may not become uid 1000: run it with --user 1000:0, or with the capabilities SETUID and SETGID." >&2
    exit 1
  fi
  find /data -user 0 -exec chown --no-dereference 1000 {} + 2>/dev/null \
    || echo "Files in /data could not be given to uid 1000. It may be unable to write there." >&2
  # Ports below 1024, where the runtime does not open them to every user.
  ports="--inh-caps=+net_bind_service --ambient-caps=+net_bind_service"
  if $become $ports true 2>/dev/null; then become="$become $ports"; fi
fi
exec $become lorikeet-launcher "$@"
