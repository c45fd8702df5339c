# Runs on Debian's and Fedora's families; the release tool fills in the names.
set -e
ctl=/usr/sbin/ebpfnetctl
plugins=@PLUGINS@
# Where runtimes look that do not come from the distribution.
other_plugins=/opt/cni/bin
units="ebpfnet-load.service ebpfnet-metrics.timer ebpfnet-metrics.service"

say() { echo "ebpfnet: $*" >&2; }
has_systemd() { [ -d /run/systemd/system ]; }

