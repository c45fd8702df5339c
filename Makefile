# The commands of the project, and the only place of C flags. `make help` lists them.

CLANG        ?= clang-19
LLVM_STRIP   ?= llvm-strip-19
CLANG_FORMAT ?= clang-format-19
# The include path has the build machine's asm/ headers; the BPF code is the same on every machine.
BPF_CFLAGS   := -O2 -g -Wall -Wextra -Wno-unused-parameter -Wno-address-of-packed-member -Werror -mcpu=v3 \
	-I/usr/include/$(shell uname -m)-linux-gnu

# Debian packages that `make test` needs beside Go and make. `make demo` needs none.
PACKAGES := clang-19 llvm-19 clang-format-19 libbpf-dev linux-libc-dev bpftool nftables iptables ipvsadm iproute2 iputils-ping traceroute strace ethtool dnsmasq-base procps udev crun jq
BENCH_PACKAGES := nftables iptables
CI_PACKAGES := mmdebstrap
RUNTIME_PACKAGES := podman conmon crun busybox-static iproute2 iptables nftables
RELEASE_PACKAGES := mmdebstrap rpm iproute2 git crun lintian
CLUSTER_PACKAGES := runc busybox-static curl wget nftables iptables iproute2 iputils-ping netcat-openbsd gcc libc6-dev
KERNEL_PACKAGES := qemu-system-x86 kmod xz-utils zstd debian-archive-keyring

PREFIX ?= /opt/cni/bin
SBIN   ?= /usr/local/sbin
HOOKS  ?= /etc
SHARE  ?= /usr/local/share
# For test-kernels and verified: series of test/vm/kernels.txt; empty: all of them. JOBS: how many at once.
KERNEL ?=
JOBS   ?= 1
KERNEL_SUITES := prog scenario conformance
GO     ?= go
# What `ebpfnetctl version` and logs say; without it "devel".
VERSION ?=
LDFLAGS := $(if $(VERSION),-X github.com/ebpfnet/ebpfnet/plugin/version.release=$(VERSION))
# Plain binaries: they run in every container image and on every kernel of test-kernels.
export CGO_ENABLED := 0

.PHONY: help
help: ## list the commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## build bin/ebpfnet, bin/ebpfnet-ipam and bin/ebpfnetctl
	$(GO) build -trimpath -buildvcs=false -ldflags "$(LDFLAGS)" -o bin/ ./cmd/...

.PHONY: node
node: ## build bin/ebpfnet-node, the agent for clusters
	cd cmd/ebpfnet-node && $(GO) build -trimpath -ldflags '-s -w' -o ../../bin/ .

# What install installs: mode, file in bin, and where. The manual has more files.
INSTALLED = \
	0755:ebpfnet:$(PREFIX)/ebpfnet \
	0755:ebpfnet-ipam:$(PREFIX)/ebpfnet-ipam \
	0755:ebpfnetctl:$(SBIN)/ebpfnetctl \
	0644:90-ebpfnet.rules:$(HOOKS)/udev/rules.d/90-ebpfnet.rules \
	0755:90-ebpfnet:$(HOOKS)/NetworkManager/dispatcher.d/90-ebpfnet \
	0755:90-ebpfnet:$(HOOKS)/networkd-dispatcher/routable.d/90-ebpfnet \
	0644:completion.bash:$(SHARE)/bash-completion/completions/ebpfnetctl \
	0644:completion.zsh:$(SHARE)/zsh/site-functions/_ebpfnetctl \
	0644:completion.fish:$(SHARE)/fish/vendor_completions.d/ebpfnetctl.fish

.PHONY: install
install: man ## install the plugins into PREFIX (/opt/cni/bin), ebpfnetctl into SBIN (/usr/local/sbin), its manual and completions into SHARE (/usr/local/share), hooks of network managers into HOOKS (/etc)
	for hook in 90-ebpfnet 90-ebpfnet.rules; do sed 's|@SBIN@|$(SBIN)|' cmd/ebpfnetctl/hooks/$$hook >bin/$$hook; done
	for shell in bash zsh fish; do bin/ebpfnetctl completion $$shell >bin/completion.$$shell || exit 1; done
	for file in $(INSTALLED); do (IFS=:; set -- $$file; install -D -m $$1 bin/$$2 "$(DESTDIR)$$3") || exit 1; done
	install -D -m 0644 -t $(DESTDIR)$(SHARE)/man/man8 bin/man/*.8

# Without the plugin, a runtime cannot remove its containers. Configurations and reservations stay.
.PHONY: uninstall
uninstall: ## remove what install has installed, and ebpfnet from the kernel; fails while a container is connected
	if [ -z "$(DESTDIR)" ] && [ -x $(SBIN)/ebpfnetctl ]; then $(SBIN)/ebpfnetctl unload --if-unused; fi
	for file in $(INSTALLED); do rm -f "$(DESTDIR)$${file##*:}" || exit 1; done
	rm -f $(DESTDIR)$(SHARE)/man/man8/ebpfnetctl.8 $(DESTDIR)$(SHARE)/man/man8/ebpfnetctl-*.8

.PHONY: man
man: build ## write the manual of ebpfnetctl into bin/man
	rm -rf bin/man && mkdir -p bin/man && bin/ebpfnetctl man bin/man

.PHONY: demo
demo: build ## see ebpfnet work, in its own network namespaces (root)
	@cd test && $(GO) build -trimpath -o ../bin/demo ./demo
	@EBPFNET_BIN_DIR=$(CURDIR)/bin bin/demo cmd/ebpfnet/example.conflist

.PHONY: test
test: deps lint check-generated unit system fuzz-short ## lint, and all tests but long ones on this kernel (root, Debian 12; installs what is missing)

.PHONY: unit
unit: ## unit tests; no root
	$(GO) test ./...
	cd cmd/ebpfnet-node && $(GO) test ./...
	cd test/chart && $(GO) test ./...
	cd test/judges && $(GO) test ./...

# Most tests wait for the kernel, so both fit on two cores. All namespaces share one queue of each CPU, which drops packets of one test
# while another one floods it.
.PHONY: system
system: modules ## packet tables, scenarios and the CNI contract, in their own network namespaces (root)
	@was=$$(sysctl -n net.core.netdev_max_backlog); trap "sysctl -qw net.core.netdev_max_backlog=$$was" EXIT; \
	sysctl -qw net.core.netdev_max_backlog=100000 && $(MAKE) --no-print-directory -j2 system-host system-cluster

.PHONY: system-host system-cluster
system-host:
	cd test && $(GO) test -count=1 -timeout 60m ./scenario ./... # first what takes longest: the others run beside it
system-cluster:
	cd test/cluster && $(GO) test -count=1 -timeout 30m ./...

.PHONY: test-long
test-long: modules ## a million random packets, 100,000 random policies, floods of a million flows, what an attacker does in ten minutes, kills at each system call, clusters of 5,000 nodes, a thousand pods under policies, and the memory of an agent (root)
	cd test && $(GO) test -count=1 -timeout 30m ./prog -run '^TestRandomPackets$$' -rounds 1000000
	cd test && $(GO) test -count=1 -timeout 60m ./prog -run '^TestJudgedPolicies$$' -cases 100000
	cd test && $(GO) test -count=1 -timeout 90m ./scenario -long -run 'Flood|ShortConnections|TestPodsShareTheirPorts|TestUpgrade|TestBandwidthChanges'
	cd test && $(GO) test -count=1 ./conformance -run '^TestCtlDropsFlood$$' -dropflood 1000000
	cd test && $(GO) test -count=1 -timeout 30m ./conformance -long -run 'Killed$$'
	cd test/cluster && $(GO) test -count=1 -v -timeout 30m -run '^TestScale$$' . -scale 1000,5000
	cd test/cluster && $(GO) test -count=1 -timeout 40m -run '^Test(PodsUnder|Hostile)Policies$$' . -long

.PHONY: scale
scale: modules ## measure the node agent in clusters of 1,000 and 5,000 nodes, on a quiet machine; writes its SCALE.md (root)
	cd test/cluster && $(GO) test -count=1 -v -timeout 30m -run '^TestScale$$' . -scale 1000,5000 -scale-report $(CURDIR)/cmd/ebpfnet-node

# What fuzz-short spends on each target: inputs, since a time can pass before a busy machine has loaded the programs.
FUZZTIME ?= 5000x

.PHONY: fuzz-short
fuzz-short: ## run each fuzz target for FUZZTIME (5000x: inputs, or 10s); the packet target needs root
	@grep -ro '^func Fuzz[A-Za-z0-9]*' --include='*_test.go' . | while IFS=: read -r file func; do \
		echo "$$file $${func#func }"; \
		(cd $$(dirname $$file) && $(GO) test -run '^$$' -fuzz "^$${func#func }\$$" -fuzztime $(FUZZTIME) . </dev/null) || exit 1; done

.PHONY: test-kernels
test-kernels: matrix-binaries ## run packet tables, scenarios, the CNI contract and node agents on the kernels of test/vm/kernels.txt (KERNEL=5.10: one) in qemu; writes test/vm/README.md
	bin/matrix -bin bin -jobs $(JOBS) -readme test/vm/README.md $(KERNEL)

.PHONY: test-kernels-quick
test-kernels-quick: matrix-binaries ## run a selection on the oldest and the newest kernel
	bin/matrix -bin bin -jobs 2 -quick $(KERNEL)

# How many pods each containerd makes and removes in test-runtimes.
CHURN ?= 50

.PHONY: test-arm64
test-arm64: kernel-deps ## run the packet tables on an emulated arm64 kernel (KERNEL=5.10: another one than 6.12) (root)
	@$(call install-packages,qemu-system-arm)
	cd test && $(GO) build -o ../bin/ ./vm && GOARCH=arm64 $(GO) build -o ../bin/arm64/ ./vm && GOARCH=arm64 $(GO) test -c -o ../bin/arm64/prog.test ./prog
	cd test/prog && ../../bin/vm -arch arm64 -kernel $(or $(KERNEL),6.12) -timeout 2h -- ../../bin/arm64/prog.test -test.short -test.timeout=0

.PHONY: test-s390x
test-s390x: ## big endian: build for s390x, and run the tests of maps, loader and plugin on an emulated CPU
	@$(call install-packages,qemu-user)
	GOARCH=s390x $(GO) build ./...
	cd cmd/ebpfnet-node && GOARCH=s390x $(GO) build -o /dev/null .
	GOARCH=s390x $(GO) test -exec qemu-s390x ./bpf ./maps ./loader/... ./plugin/...

.PHONY: test-runtimes
test-runtimes: build bin/debian bin/runtimes/debian.tar bin/crio bin/nomad ## run the plugin under podman, containerd, CRI-O, nerdctl and Nomad, which it installs or builds; in their own namespaces (root); CHURN=1000: more pods
	@$(call install-packages,$(RUNTIME_PACKAGES))
	$(MAKE) --no-print-directory release VERSION=0.0.0-test
	cd test/runtimes/nerdctl && $(GO) build -trimpath -o ../../../bin/ tool
	cd test/runtimes && $(GO) build -trimpath -o ../../bin/ tool && $(GO) vet ./... && $(GO) tool -modfile=../../go.mod staticcheck ./...
	cd test/runtimes && EBPFNET_BIN_DIR=$(CURDIR)/bin $(GO) test -count=1 -timeout 60m . -churn $(CHURN)

# CRI-O's modules are copied to add what the checksum database lacks.
bin/crio: $(wildcard test/runtimes/crio/*)
	rm -rf $@.src && mkdir -p $@.src && cp test/runtimes/crio/go.* $@.src
	cd $@.src && $(GO) mod vendor
	cp test/runtimes/crio/update_pod_sandbox.go $@.src/vendor/github.com/containerd/nri/pkg/adaptation
	cd $@.src && $(GO) build -tags containers_image_openpgp,exclude_graphdriver_btrfs -trimpath -o .. tool
	rm -r $@.src

# Nomad's executor has parts in C.
bin/nomad: $(wildcard test/runtimes/nomad/*)
	@$(call install-packages,gcc libc6-dev)
	cd test/runtimes/nomad && CGO_ENABLED=1 $(GO) build -trimpath -o ../../../bin/ tool

# Debian's containerd is unpacked, not installed: a package would start it, and end Docker's.
bin/debian:
	rm -rf bin/unpacked && mkdir -p bin/unpacked
	apt-get update -qq && cd bin/unpacked && apt-get download -qq containerd && dpkg -x containerd_*.deb .
	mv bin/unpacked $@

.PHONY: release
release: ## build what a release has into bin/release/VERSION, without a network: packages, archives, image, SBOM, checksums
	@[ -n "$(VERSION)" ] || { echo "make release VERSION=1.2.3 (for a preview 1.2.3-rc.1)"; exit 2; }
	cd cmd/release && $(GO) run . -version $(VERSION) -source ../.. -out ../../bin/release/$(VERSION)

.PHONY: test-packages
test-packages: release-twice bin/packages/debian.tar ## build a release twice, install, upgrade and remove its packages in a bare Debian, follow the README there, and run its image (root)
	cd test/packages && $(GO) vet ./... && $(GO) tool -modfile=../../go.mod staticcheck ./...
	for tag in $$(git tag --list 'v*'); do $(MAKE) --no-print-directory bin/packages/$$tag || exit 1; done
	cd test/packages && $(GO) test -count=1 -timeout 60m . && $(GO) test -count=1 -timeout 60m -v ./quickstart
	cd test/cluster && EBPFNET_IMAGE=$(CURDIR)/bin/packages/present/ebpfnet-0.0.0-test-image.tar $(GO) test -count=1 -run '^TestContainer$$' .

# Two builds at different times, the second without a network and in another environment.
.PHONY: release-twice
release-twice:
	@$(call install-packages,$(RELEASE_PACKAGES))
	cd cmd/release && $(GO) vet ./... && $(GO) tool -modfile=../../go.mod staticcheck ./... && $(GO) test ./...
	cd cmd/release && $(GO) build -o ../../bin/packages/ .
	bin/packages/release -version 0.0.0-test -source . -out bin/packages/present
	umask 077 && TZ=Asia/Tokyo LC_ALL=C unshare --net bin/packages/release -version 0.0.0-test -source $(CURDIR) -out bin/packages/again
	diff -r bin/packages/present bin/packages/again
	rm -r bin/packages/again
	bin/packages/release -version 0.0.0-older -source . -out bin/packages/older # to upgrade from

# What users have: each release that has a tag, built by its own sources.
bin/packages/v%:
	git worktree add --detach bin/packages/source v$*
	cd bin/packages/source/cmd/release && $(GO) run . -version $* -source ../.. -out $(CURDIR)/bin/packages/partial && mv $(CURDIR)/bin/packages/partial $(CURDIR)/$@; \
		built=$$?; cd $(CURDIR) && git worktree remove --force bin/packages/source && exit $$built

# A bare Debian, and one with its containerd.
bin/packages/debian.tar: DEBIAN = systemd,udev,networkd-dispatcher,network-manager
bin/runtimes/debian.tar: DEBIAN = containerd,containernetworking-plugins,crun
bin/packages/debian.tar bin/runtimes/debian.tar:
	@$(call install-packages,mmdebstrap)
	mkdir -p $(@D)
	apt-get update -qq # indextargets knows the origin of updated lists only
	apt-get indextargets --format 'deb $$(REPO_URI) $$(RELEASE) $$(COMPONENT)' 'Created-By: Packages' 'Origin: Debian' >$(@D)/sources.list
	apt-config dump | sed -n '/^Acquire::http/p' >$(@D)/apt.conf # proxies
	mmdebstrap --quiet --format=tar --variant=minbase --include=$(DEBIAN) --aptopt=$(@D)/apt.conf '' $@.part $(@D)/sources.list
	mv $@.part $@

.PHONY: cluster
cluster: cluster-binaries e2e-binary ## run Kubernetes on three nodes, with the agent from the manifests, in its own namespaces: dual stack, then IPv6 alone (root)
	cd test/kube && $(call run-cluster,dual-stack,-run '^(TestAgents|TestKubernetes|TestFlannel|TestNetworkPolicy|TestE2E)$$' -e2e '$(SOME_E2E)')
	cd test/kube && $(call run-cluster,ipv6,-run '^(TestAgents|TestKubernetes|TestE2E)$$' -families IPv6 -mode auto -e2e '$(SOME_E2E)')

# Of Kubernetes' own tests, some of NetworkPolicy.
SOME_E2E = Netpol .*(deny-all|one named port|CIDR|updated|on Ports|controlled independently)

# Of both families, or of one: FAMILIES=IPv6. The agent's mode: tunnel or auto. kube-proxy's: nftables or iptables.
FAMILIES ?= IPv4,IPv6
MODE     ?= tunnel
PROXY    ?= nftables

.PHONY: cluster-e2e
cluster-e2e: cluster-binaries e2e-binary cnp-binary ## run Kubernetes' own tests of networking on such a cluster (root; FAMILIES=IPv6; MODE=auto; PROXY=iptables; E2E=EXPRESSION: some of them)
	cd test/kube && $(call run-cluster,e2e,-run '^(TestE2E|TestClusterNetworkPolicy)$$' -families $(FAMILIES) -mode $(MODE) -proxy-mode $(PROXY) -e2e '$(E2E)')

# The conformance tests of ClusterNetworkPolicy, without what asks for SCTP, and its definition.
.PHONY: cnp-binary
cnp-binary:
	rm -rf bin/npa && cp -r $(NPA) bin/npa && chmod -R u+w bin/npa
	sed -i 's/^func PokeServer(.*/&\n\tif protocol == "sctp" {\n\t\treturn\n\t}/' bin/npa/conformance/utils/kubernetes/helper.go
	cd bin/npa && $(GO) test -c -vet=off -o ../clusternetworkpolicies.test ./conformance
	rm -rf bin/npa
	install -m 0644 $(NPA)/config/crd/experimental/policy.networking.k8s.io_clusternetworkpolicies.yaml bin/clusternetworkpolicies.yaml
NPA = $(shell cd cmd/ebpfnet-node && $(GO) list -m -f '{{.Dir}}' sigs.k8s.io/network-policy-api)

.PHONY: e2e-binary
e2e-binary:
	cd test/kube && $(GO) test -c -vet=off -trimpath -ldflags "$(KUBE_LDFLAGS)" -o ../../bin/e2e.test ./e2e

# run-cluster runs tests on a cluster; the logs of all its programs are in bin/logs/$(1).
run-cluster = rm -rf ../../bin/logs/$(1) && mkdir -p ../../bin/logs/$(1) && \
	EBPFNET_BIN_DIR=$(CURDIR)/bin $(GO) test -count=1 -v -timeout 150m . -logs $(CURDIR)/bin/logs/$(1) $(2)
KUBE_LDFLAGS = -s -w -X k8s.io/component-base/version.gitVersion=$(shell cd test/kube && $(GO) list -m -f '{{.Version}}' k8s.io/kubernetes)

.PHONY: cluster-up
cluster-up: cluster-test ## start such a cluster and leave it running; prints how to use it (root; FAMILIES=IPv6; MODE=auto)
	@! $(cluster-runs) || { echo "a cluster is running: make cluster-down"; exit 1; }
	@rm -rf $(UP) && mkdir -p $(UP)
	@cd test/kube && exec env EBPFNET_BIN_DIR=$(CURDIR)/bin setsid ../../bin/kube.test -test.run '^TestUp$$' -test.v -test.timeout=0 \
		-up $(UP) -logs $(UP) -families $(FAMILIES) -mode $(MODE) >$(UP)/log 2>&1 </dev/null & echo $$! >$(UP)/pid
	@echo "starting three nodes: about two minutes"
	@until [ -e $(UP)/node ]; do sleep 1; kill -0 $$(cat $(UP)/pid) || { tail -n 30 $(UP)/log; exit 1; }; done
	@sed 's|@UP@|$(UP)|g; s|@BIN@|$(CURDIR)/bin|g' test/kube/usage.txt

.PHONY: cluster-down
cluster-down: ## stop the cluster of `make cluster-up` (root)
	@! $(cluster-runs) || kill $$(cat $(UP)/pid)
	@while $(cluster-runs); do sleep 1; done
	@rm -f $(UP)/pid $(UP)/node $(UP)/kubeconfig

UP = $(CURDIR)/bin/cluster
cluster-runs = grep -qs bin/kube.test /proc/$$(cat $(UP)/pid 2>/dev/null || echo none)/cmdline

.PHONY: cluster-test
cluster-test: cluster-binaries
	cd test/kube && $(GO) test -c -trimpath -o ../../bin/kube.test .

# All programs of a cluster, from the modules in test/kube/go.mod. The first time it compiles 3,600 packages. A part of
# flannel is in C; its plugin is from a module of its own.
.PHONY: cluster-binaries
cluster-binaries: build node
	@$(call install-packages,$(CLUSTER_PACKAGES))
	@cd test/kube && echo "building Kubernetes: up to $$($(GO) list -deps tool ./pause | wc -l) packages" && \
		$(call build-visibly,-ldflags "$(KUBE_LDFLAGS)" $$($(GO) list tool | grep -v $(FLANNEL)) ./pause)
	@cd test/kube && echo "building flannel" && export CGO_ENABLED=1 && $(call build-visibly,$(FLANNEL))
	mv bin/server bin/etcd # Go names programs by their directories
	mv bin/cmd bin/kube-network-policies
	mkdir -p bin/flannel.d && cd test/kube/flannel && $(GO) build -trimpath -o ../../../bin/flannel.d/ tool
	cd test/kube && install -m 0644 $$($(GO) list -m -f '{{.Dir}}' $(FLANNEL))/Documentation/kube-flannel.yml ../../bin/flannel.d
	cd test/kube && install -m 0644 $$($(GO) list -m -f '{{.Dir}}' sigs.k8s.io/kube-network-policies)/install.yaml ../../bin/kube-network-policies.yaml
	cd test/kube && $(GO) vet . ./pause && $(GO) tool -modfile=../../go.mod staticcheck . ./pause

FLANNEL = github.com/flannel-io/flannel

# build-visibly counts the packages that `go build -v` names, and prints other lines as they are. "failed" is the last one.
build-visibly = { $(GO) build -v -trimpath -o ../../bin/ $(1) 2>&1 || echo failed; } | ( packages=0; while read -r line; do case $$line in \
	failed) exit 1 ;; \
	*[:\ ]*) echo "$$line" ;; \
	*) packages=$$((packages + 1)); [ $$((packages % 50)) != 0 ] || echo "$$packages packages: $$line" ;; \
	esac; done )

.PHONY: bench
bench: bench-binaries ## compare ebpfnet with a bare veth, plain routing and the reference plugins on a quiet machine; writes test/bench/RESULTS.md (root)
	EBPFNET_BIN_DIR=$(CURDIR)/bin bin/bench -json bin/bench.json -results test/bench/RESULTS.md

.PHONY: bench-quick
bench-quick: bench-binaries ## a selection in three minutes (root)
	EBPFNET_BIN_DIR=$(CURDIR)/bin bin/bench -quick -json bin/bench.json

.PHONY: bench-binaries
bench-binaries: build
	@$(call install-packages,$(BENCH_PACKAGES))
	cd test && $(GO) build -trimpath -o ../bin/ ./bench tool # tool: the reference plugins

.PHONY: verified
verified: kernel-binaries ## update test/prog/testdata/verified.txt for these kernels
	cd test/prog && for kernel in $(or $(KERNEL),$$(../../bin/vm -list | cut -f 1)); do \
		../../bin/vm -kernel $$kernel -share testdata -- ../../bin/prog.test -test.run '^TestLoad$$' -update || exit 1; done

.PHONY: kernel-binaries
kernel-binaries: kernel-deps build
	cd test && $(GO) build -o ../bin/ ./vm ./vm/matrix tool # tool: the reference plugins
	cd test/judges && $(GO) build -o ../../bin/ .
	cd test && for suite in $(KERNEL_SUITES); do $(GO) test -c -o ../bin/$$suite.test ./$$suite || exit 1; done

.PHONY: matrix-binaries
matrix-binaries: kernel-binaries node
	cd test/cluster && $(GO) test -c -o ../../bin/cluster.test .

.PHONY: generate
generate: ## compile the BPF programs
	BPF2GO_CC=$(CLANG) BPF2GO_STRIP=$(LLVM_STRIP) BPF2GO_CFLAGS="$(BPF_CFLAGS)" $(GO) generate ./bpf
	@cd bpf && sum=$$(sha256sum datapath_bpfel.o | cut -c1-16) && sed -i "s/^const Build .*/const Build uint64 = 0x$$sum/" build.go

.PHONY: check-generated
check-generated: ## fail if the generated files do not match the sources
	@mkdir -p bin && sha256sum bpf/*_bpfe* bpf/build.go >bin/generated
	@$(MAKE) --no-print-directory generate
	@sha256sum --check --quiet bin/generated || { echo "bpf: generated files were not up to date; commit the output of 'make generate'"; exit 1; }

# Only loader/rtnl opens routing netlink and dumps: it retries interrupted dumps.
FORBIDDEN := -analyze_types -set_exit_status \
	'{p: "^netlink\\.(Handle\\.)?(NewHandle\\w*|(Addr|Bridge\\w*|Chain|Class|Filter|Link|Neigh\\w*|Qdisc|Route|Rule)List\\w*)$$", pkg: ^github.com/vishvananda/netlink$$, msg: use loader/rtnl}' \
	'{p: "^nl\\.NewNetlinkRequest$$", pkg: ^github.com/vishvananda/netlink/nl$$, msg: use loader/rtnl}' --

# Text from outside reaches a terminal by printf, which makes it safe.
UNSAFE_PRINT := -set_exit_status '{p: "^fmt\\.(Fp|P)rint\\w*$$", msg: use printf}' --

.PHONY: lint
lint: ## vet, staticcheck, forbidden calls, gofmt and clang-format
	$(GO) vet ./...
	cd test && $(GO) vet ./...
	cd cmd/ebpfnet-node && $(GO) vet ./...
	cd test/cluster && $(GO) vet ./...
	cd test/chart && $(GO) vet ./...
	cd test/judges && $(GO) vet ./...
	$(GO) tool staticcheck ./...
	cd test && $(GO) tool -modfile=../go.mod staticcheck ./...
	cd cmd/ebpfnet-node && $(GO) tool -modfile=../../go.mod staticcheck ./...
	cd test/cluster && $(GO) tool -modfile=../../go.mod staticcheck ./...
	cd test/chart && $(GO) tool -modfile=../../go.mod staticcheck ./...
	cd test/judges && $(GO) tool -modfile=../../go.mod staticcheck ./...
	$(GO) tool forbidigo $(FORBIDDEN) $$($(GO) list ./... | grep -v /loader/rtnl)
	$(GO) tool forbidigo $(UNSAFE_PRINT) ./cmd/ebpfnetctl/...
	cd test && $(GO) tool -modfile=../go.mod forbidigo $(FORBIDDEN) ./...
	cd cmd/ebpfnet-node && $(GO) tool -modfile=../../go.mod forbidigo $(FORBIDDEN) ./...
	cd test/cluster && $(GO) tool -modfile=../../go.mod forbidigo $(FORBIDDEN) ./...
	@unformatted=$$(gofmt -l $$(find . -name '*.go' -not -path './bin/*')); [ -z "$$unformatted" ] || { echo "not gofmt'ed: $$unformatted"; exit 1; }
	$(CLANG_FORMAT) --dry-run --Werror bpf/*.c bpf/*.h

.PHONY: fmt
fmt: ## format Go and C
	gofmt -w .
	$(CLANG_FORMAT) -i bpf/*.c bpf/*.h

# The tests build the reference plugins without a network, so their modules are downloaded first.
.PHONY: modules
modules:
	@for module in test test/cluster test/chart test/judges cmd/ebpfnet-node; do (cd $$module && $(GO) mod download) || exit 1; done

.PHONY: deps
deps:
	@$(call install-packages,$(PACKAGES))

.PHONY: ci-deps
ci-deps:
	@$(call install-packages,$(CI_PACKAGES))

.PHONY: kernel-deps
kernel-deps: deps
	@$(call install-packages,$(KERNEL_PACKAGES))

# Installs missing Debian packages. A machine that has them all is left alone.
define install-packages
missing=""; for p in $(1); do dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$p"; done; \
[ -z "$$missing" ] || { echo "installing$$missing"; apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $$missing >/dev/null; }
endef

.PHONY: clean
clean: ## remove what was built
	rm -rf bin
