# The watchdog: parent of every process of one throwaway cluster, and the only one that removes it.
#
# It reads commands from its standard input and answers each with one line. When that pipe ends (the Go process closed
# it, exited, panicked or was killed) it shuts the cluster down and removes the directory. Stopping on purpose is the
# same path, so it is exercised by every run. It makes the directory itself: nothing exists that it would not remove.
#
# $1 directory to make, $2 directory of the server binaries, $3 text appended to postgresql.conf, $4 initdb's host auth.
dir=$1 bin=$2 conf=$3 auth=$4 pid=
umask 077

# An answer nobody reads must not end us before we have cleaned up.
trap '' PIPE
trap 'cleanup; exit 1' HUP INT TERM

cleanup() {
	trap '' HUP INT TERM
	tries=0
	# A shell starts background commands with INT and QUIT ignored until Postgres sets its handlers: so QUIT is repeated.
	# CONT, because the process may have died between stopping the postmaster and killing it.
	while [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null; do
		if [ $tries -lt 300 ]; then kill -QUIT "$pid" && kill -CONT "$pid"; else kill -KILL "$pid"; fi 2>/dev/null
		sleep 0.05 || sleep 1
		tries=$((tries + 1))
	done
	[ -z "$pid" ] || wait "$pid"
	# A lock file left behind means the postmaster was killed, and its shared memory (System V, /dev/shm) outlives it.
	# Only a server on the same data directory finds and frees that.
	tries=0
	while [ -e "$dir/data/postmaster.pid" ] && [ $tries -lt 5 ]; do
		"$bin/postgres" --single -D "$dir/data" postgres </dev/null >>"$dir/log" 2>&1 || sleep 0.2 || sleep 1
		tries=$((tries + 1))
	done
	tries=0
	until rm -rf "$dir" 2>/dev/null || [ $tries -ge 50 ]; do
		sleep 0.1 || sleep 1
		tries=$((tries + 1))
	done
}

# init PASSWORD: makes the directory and a cluster in it. No password means no TCP.
init() {
	password=$1
	mkdir "$dir" || return
	mkfifo "$dir/alive" || return
	set -- -D "$dir/data" -U postgres -E UTF8 --locale=C --no-sync --no-instructions --auth-local=trust "--auth-host=$auth"
	if [ -n "$password" ]; then
		printf '%s\n' "$password" >"$dir/password" || return
		set -- "$@" "--pwfile=$dir/password"
	fi
	"$bin/initdb" "$@" </dev/null >>"$dir/log" 2>&1 || return
	rm -f "$dir/password" "$dir/log"
	printf '%s\n' "$conf" >>"$dir/data/postgresql.conf"
}

# unpack PASSWORD MADE: makes the directory and in it a copy of a cluster that initdb made without one. The password - is
# none.
unpack() {
	mkdir "$dir" || return
	mkfifo "$dir/alive" || return
	cp -R "${1#* }" "$dir/data" 2>>"$dir/log" || return
	password=${1%% *}
	if [ "$password" != - ]; then
		printf "alter role postgres password '%s'\n" "$password" |
			"$bin/postgres" --single -D "$dir/data" postgres >>"$dir/log" 2>&1 || return
		sed "/^host/s/reject\$/$auth/" "$dir/data/pg_hba.conf" >"$dir/data/pg_hba.new" || return
		mv "$dir/data/pg_hba.new" "$dir/data/pg_hba.conf" || return
	fi
	rm -f "$dir/log"
	printf '%s\n' "$conf" >>"$dir/data/postgresql.conf"
}

# copy CONNINFO: makes the directory and in it a standby of that server. Its settings are all in postgresql.conf.
copy() {
	mkdir "$dir" || return
	mkfifo "$dir/alive" || return
	"$bin/pg_basebackup" -d "$1" -D "$dir/data" -X stream -c fast --no-sync </dev/null >>"$dir/log" 2>&1 || return
	rm -f "$dir/log"
	: >"$dir/data/postgresql.auto.conf"
	printf '%s\n' "$conf" >>"$dir/data/postgresql.conf"
	: >"$dir/data/standby.signal"
}

cd / || exit 1
while read -r command argument; do
	case $command in
	init)
		if init "$argument" 2>/dev/null; then echo ok; else echo failed; fi
		;;
	unpack)
		if unpack "$argument" 2>/dev/null; then echo ok; else echo failed; fi
		;;
	copy)
		if copy "$argument" 2>/dev/null; then echo ok; else echo failed; fi
		;;
	start)
		# Every process of the cluster inherits descriptor 3, so the reader of this fifo sees its end when the last of them
		# has gone. Opened for reading too, since opening only to write would wait for a reader that may have died.
		exec 3<>"$dir/alive"
		"$bin/postgres" -D "$dir/data" </dev/null >>"$dir/log" 2>&1 &
		pid=$!
		exec 3>&-
		echo "ok $pid"
		;;
	reap)
		wait "$pid"
		pid=
		echo ok
		;;
	esac
done
cleanup
