# bash completion for cni-hostport; written by packaging/manual.py
_cni_hostport() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} words
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        words='status check gc doctor install uninstall helper ping metrics node-cache version --help --version'
        mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
        return
    fi
    case "${COMP_WORDS[1]}:$before" in
        status:--interval) COMPREPLY=(); return ;;
        status:--port) COMPREPLY=(); return ;;
        status:--pod) COMPREPLY=(); return ;;
        status:--network) COMPREPLY=(); return ;;
        status:--protocol) COMPREPLY=($(compgen -W 'tcp udp sctp' -- "$current")); return ;;
        status:--sort) COMPREPLY=($(compgen -W 'port pod network held connections' -- "$current")); return ;;
        install:--conflist) COMPREPLY=($(compgen -f -- "$current")); return ;;
        install:--prefix) COMPREPLY=($(compgen -d -- "$current")); return ;;
        install:--bin-dir) COMPREPLY=($(compgen -d -- "$current")); return ;;
        install:--command) COMPREPLY=($(compgen -f -- "$current")); return ;;
        install:--bundle) COMPREPLY=($(compgen -d -- "$current")); return ;;
        install:--root) COMPREPLY=($(compgen -d -- "$current")); return ;;
        uninstall:--prefix) COMPREPLY=($(compgen -d -- "$current")); return ;;
        uninstall:--root) COMPREPLY=($(compgen -d -- "$current")); return ;;
        helper:--log-format) COMPREPLY=($(compgen -W 'text json' -- "$current")); return ;;
        helper:--log-level) COMPREPLY=($(compgen -W 'debug info warning error' -- "$current")); return ;;
        helper:--listen-metrics) COMPREPLY=(); return ;;
        ping:--instance) COMPREPLY=(); return ;;
        ping:--timeout) COMPREPLY=(); return ;;
    esac
    case "${COMP_WORDS[1]}" in
        status) words='--help --json --watch --interval --port --pod --network --protocol --sort --wide' ;;
        check) words='--help --json' ;;
        gc) words='--help --dry-run --json' ;;
        doctor) words='--help --json' ;;
        install) words='--help --conflist --replace-portmap --dry-run --prefix --bin-dir --command --bundle --no-service --root' ;;
        uninstall) words='--help --dry-run --force --prefix --root' ;;
        helper) words='--help --replace --log-format --log-level --listen-metrics --linger' ;;
        ping) words='--help --instance --mine --timeout' ;;
        metrics) words='--help ' ;;
        version) words='--help --json' ;;
        *) return ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}
complete -F _cni_hostport cni-hostport
