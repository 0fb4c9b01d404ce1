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
        node-cache:-tls-client-auth-type) COMPREPLY=($(compgen -W 'NoClientCert RequestClientCert RequireAnyClientCert VerifyClientCertIfGiven RequireAndVerifyClientCert' -- "$current")); return ;;
        node-cache:-tls-min-version) COMPREPLY=($(compgen -W 'TLS10 TLS11 TLS12 TLS13' -- "$current")); return ;;
        node-cache:-interfacekind) COMPREPLY=($(compgen -W 'dummy ifb' -- "$current")); return ;;
        node-cache:-engine) COMPREPLY=($(compgen -W 'auto coredns unbound none' -- "$current")); return ;;
        node-cache:-backend) COMPREPLY=($(compgen -W 'auto iptables nftables' -- "$current")); return ;;
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
        node-cache) words='-help -localip -setupinterface -interfacename -syncinterval -metrics-listen-address -setupiptables -basecorefile -corefile -kubednscm -upstreamsvc -health-port -skipteardown -reloadwithsignal -prometheus-listen-address -tls-enabled -tls-cert-file -tls-private-key-file -tls-client-ca-file -tls-client-auth-type -tls-min-version -conf -pidfile -dns.port -p -plugins -version -quiet -interfacekind -engine -enginepath -backend -accepthealth' ;;
        *) return ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}
complete -F _cni_hostport cni-hostport
