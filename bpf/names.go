package bpf

// Names for the generated code, without its prefix and its repeated enum names.

// Keys and values of the maps, and the configuration (abi.h).
type (
	Addr           = DatapathAddr
	AdmittedFlow   = DatapathAdmittedFlow
	Attach         = DatapathAttach
	CtNAT          = DatapathCtNat
	Device         = DatapathDevice
	DeviceFlags    = DatapathDeviceFlags
	DropCount      = DatapathDropCount
	DropEvent      = DatapathDropEvent
	DropKey        = DatapathDropKey
	DropLimit      = DatapathDropLimit
	DropReader     = DatapathDropReader
	Endpoint       = DatapathEndpoint
	FastPath       = DatapathFastPath
	Flow           = DatapathFlow
	FlowBucket     = DatapathFlowBucket
	FlowEntry      = DatapathFlowEntry
	FlowKey        = DatapathFlowKey
	FlowKind       = DatapathFlowKind
	Cluster        = DatapathCluster
	FlowFlags      = DatapathFlowFlags
	FlowState      = DatapathFlowState
	FragQueueKey   = DatapathFragQueueKey
	Fragment       = DatapathFragment
	FragmentKey    = DatapathFragmentKey
	FwdAction      = DatapathFwdAction
	FwdEntry       = DatapathFwdEntry
	FwdWays        = DatapathFwdWays
	FwdKey         = DatapathFwdKey
	HostConfig     = DatapathHostConfig
	HostPort       = DatapathHostPort
	HostPortKey    = DatapathHostPortKey
	MasqSources    = DatapathMasqSources
	Moved          = DatapathMoved
	MasqSourcesKey = DatapathMasqSourcesKey
	Node           = DatapathNode
	NodeMode       = DatapathNodeMode
	Prefix         = DatapathPrefix
	Offload        = DatapathOffload
	OffloadState   = DatapathOffloadState
	PeerKind       = DatapathPeerKind
	Policy         = DatapathPolicy
	PolicyChecks   = DatapathPolicyChecks
	RuleSetFlags   = DatapathRuleSetFlags
	RuleKey        = DatapathRuleKey
	RuleSet        = DatapathRuleSet
	Rule           = DatapathRule
	PrefixKey      = DatapathPrefixKey
	QueuedFrag     = DatapathQueuedFrag
	Reason         = DatapathReason
	PortRange      = DatapathPortRange
	Routed         = DatapathRouted
	StackHook      = DatapathStackHook
	StackNote      = DatapathStackNote
	Uplink         = DatapathUplink
	Maps           = DatapathMaps
)

// Constants of abi.h.
const (
	AttachTCX    = DatapathAttachATTACH_TCX
	AttachClsact = DatapathAttachATTACH_CLSACT

	DeviceAntiSpoof  = DatapathDeviceFlagsDEVICE_ANTI_SPOOF
	DeviceBridged    = DatapathDeviceFlagsDEVICE_BRIDGED
	DeviceAnyAddress = DatapathDeviceFlagsDEVICE_ANY_ADDRESS
	DeviceShaped     = DatapathDeviceFlagsDEVICE_SHAPED
	DevicePod        = DatapathDeviceFlagsDEVICE_POD

	EndpointMasq        = DatapathEndpointFlagsENDPOINT_MASQ
	EndpointMasqTunnels = DatapathEndpointFlagsENDPOINT_MASQ_TUNNELS

	FastPathNever       = DatapathFastPathFAST_PATH_NEVER
	FastPathEstablished = DatapathFastPathFAST_PATH_ESTABLISHED
	FastPathAlways      = DatapathFastPathFAST_PATH_ALWAYS
	FastPathAuto        = DatapathFastPathFAST_PATH_AUTO

	FlowSNAT    = DatapathFlowKindFLOW_SNAT
	FlowDNAT    = DatapathFlowKindFLOW_DNAT
	FlowPolicy  = DatapathFlowKindFLOW_POLICY
	FlowOffload = DatapathFlowKindFLOW_OFFLOAD
	FlowRSTHeld = DatapathFlowKindFLOW_RST_HELD
	FlowPair    = DatapathFlowKindFLOW_PAIR
	FlowCTNAT   = DatapathFlowKindFLOW_CT_NAT

	FlowSYNSent     = DatapathFlowStateFLOW_SYN_SENT
	FlowSYNRecv     = DatapathFlowStateFLOW_SYN_RECV
	FlowEstablished = DatapathFlowStateFLOW_ESTABLISHED
	FlowFINWait     = DatapathFlowStateFLOW_FIN_WAIT
	FlowCloseWait   = DatapathFlowStateFLOW_CLOSE_WAIT
	FlowLastACK     = DatapathFlowStateFLOW_LAST_ACK
	FlowTimeWait    = DatapathFlowStateFLOW_TIME_WAIT
	FlowClose       = DatapathFlowStateFLOW_CLOSE
	FlowUDP         = DatapathFlowStateFLOW_UDP
	FlowUDPStream   = DatapathFlowStateFLOW_UDP_STREAM
	FlowICMP        = DatapathFlowStateFLOW_ICMP
	FlowOther       = DatapathFlowStateFLOW_OTHER
	FlowStates      = DatapathFlowStateFLOW_STATES

	FlowReplied    = DatapathFlowFlagsFLOW_REPLIED
	FlowPickedUp   = DatapathFlowFlagsFLOW_PICKED_UP
	FlowFIN        = DatapathFlowFlagsFLOW_FIN
	FlowRemoteFIN  = DatapathFlowFlagsFLOW_REMOTE_FIN
	FlowFINUnacked = DatapathFlowFlagsFLOW_FIN_UNACKED
	FlowRSTUnknown = DatapathFlowFlagsFLOW_RST_UNKNOWN
	FlowContinues  = DatapathFlowFlagsFLOW_CONTINUES
	FlowByRemote   = DatapathFlowFlagsFLOW_BY_REMOTE

	FwdRoute     = DatapathFwdActionFWD_ROUTE
	FwdStack     = DatapathFwdActionFWD_STACK
	FwdContainer = DatapathFwdActionFWD_CONTAINER
	FwdNATNone   = DatapathFwdNatFWD_NAT_NONE
	FwdNATSrc    = DatapathFwdNatFWD_NAT_SRC

	HookNetfilter = DatapathStackHookHOOK_NETFILTER
	HookBridge    = DatapathStackHookHOOK_BRIDGE
	HookIPsec     = DatapathStackHookHOOK_IPSEC
	HookNetdev    = DatapathStackHookHOOK_NETDEV
	HookTC        = DatapathStackHookHOOK_TC
	HookUnknown   = DatapathStackHookHOOK_UNKNOWN

	HostPortForward = DatapathHostPortDirHOST_PORT_FORWARD
	HostPortReverse = DatapathHostPortDirHOST_PORT_REVERSE

	NodeTunnel = DatapathNodeModeNODE_TUNNEL
	NodeDirect = DatapathNodeModeNODE_DIRECT
	NodeEither = DatapathNodeModeNODE_EITHER

	OffloadDelivered = DatapathOffloadStateOFFLOAD_DELIVERED
	OffloadFIN       = DatapathOffloadStateOFFLOAD_FIN
	OffloadFINACK    = DatapathOffloadStateOFFLOAD_FIN_ACK

	PeerAny     = DatapathPeerKindPEER_ANY
	PeerOutside = DatapathPeerKindPEER_OUTSIDE
	PeerNetwork = DatapathPeerKindPEER_NETWORK
	PeerClass   = DatapathPeerKindPEER_CLASS
	PeerBlock   = DatapathPeerKindPEER_BLOCK

	PolicyCheckAny  = DatapathPolicyChecksPOLICY_CHECK_ANY
	PolicyCheckHost = DatapathPolicyChecksPOLICY_CHECK_HOST
	PolicyPod       = DatapathPolicyChecksPOLICY_POD

	RuleSetHost  = DatapathRuleSetFlagsRULE_SET_HOST
	RuleSetAudit = DatapathRuleSetFlagsRULE_SET_AUDIT

	ReasonNoSource      = DatapathReasonREASON_NO_SOURCE
	ReasonNoPort        = DatapathReasonREASON_NO_PORT
	ReasonFragment      = DatapathReasonREASON_FRAGMENT
	ReasonProtocol      = DatapathReasonREASON_PROTOCOL
	ReasonTruncated     = DatapathReasonREASON_TRUNCATED
	ReasonRewrite       = DatapathReasonREASON_REWRITE
	ReasonNoFlow        = DatapathReasonREASON_NO_FLOW
	ReasonMAC           = DatapathReasonREASON_MAC
	ReasonAddress       = DatapathReasonREASON_ADDRESS
	ReasonGateway       = DatapathReasonREASON_GATEWAY
	ReasonARP           = DatapathReasonREASON_ARP
	ReasonNeighbor      = DatapathReasonREASON_NEIGHBOR
	ReasonRouter        = DatapathReasonREASON_ROUTER
	ReasonDHCPServer    = DatapathReasonREASON_DHCP_SERVER
	ReasonHeaders       = DatapathReasonREASON_HEADERS
	ReasonPolicyIngress = DatapathReasonREASON_POLICY_INGRESS
	ReasonPolicyEgress  = DatapathReasonREASON_POLICY_EGRESS
	ReasonPolicyAudit   = DatapathReasonREASON_POLICY_AUDIT
	ReasonSrcRange      = DatapathReasonREASON_SRC_RANGE
	ReasonICMPError     = DatapathReasonREASON_ICMP_ERROR
	ReasonNextHop       = DatapathReasonREASON_NEXT_HOP
	ReasonTunnel        = DatapathReasonREASON_TUNNEL
	ReasonBridge        = DatapathReasonREASON_BRIDGE
	ReasonNode          = DatapathReasonREASON_NODE
	ReasonNoEndpoint    = DatapathReasonREASON_NO_ENDPOINT
	ReasonOwnSource     = DatapathReasonREASON_OWN_SOURCE
	ReasonNoOffload     = DatapathReasonREASON_NO_OFFLOAD
	ReasonMax           = DatapathReasonREASON_MAX
)

// Names of the maps (maps.h, and SCRATCH elsewhere).
const (
	MapCluster       = DatapathMapCluster
	MapDevices       = DatapathMapDevices
	MapDropEvents    = DatapathMapDropEvents
	MapDropLimits    = DatapathMapDropLimits
	MapDropReader    = DatapathMapDropReader
	MapDropTotals    = DatapathMapDropTotals
	MapDrops         = DatapathMapDrops
	MapEndpoints     = DatapathMapEndpoints
	MapAdmittedFlows = DatapathMapAdmittedFlows
	MapFlowBuckets   = DatapathMapFlowBuckets
	MapFlowTable     = DatapathMapFlowTable
	MapFragQueue     = DatapathMapFragQueue
	MapFragments     = DatapathMapFragments
	MapFwdCache      = DatapathMapFwdCache
	MapFwdWays       = DatapathMapFwdWays
	MapGeneration    = DatapathMapGeneration
	MapPeerClasses   = DatapathMapPeerClasses
	MapPolicies      = DatapathMapPolicies
	MapPolicyBlocks  = DatapathMapPolicyBlocks
	MapPolicyRules   = DatapathMapPolicyRules
	MapRuleSets      = DatapathMapRuleSets
	MapHostPorts     = DatapathMapHostPorts
	MapMasqSources   = DatapathMapMasqSources
	MapMovedFlows    = DatapathMapMovedFlows
	MapNodes         = DatapathMapNodes
	MapPrefixes      = DatapathMapPrefixes
	MapRouted        = DatapathMapRouted
	MapPortMarks     = DatapathMapPortMarks
	MapRouteRules    = DatapathMapRouteRules
	MapStackNotes    = DatapathMapStackNotes
	MapTupleNotes    = DatapathMapTupleNotes
	MapUplinks       = DatapathMapUplinks
)

// Names of the programs (datapath.c).
const (
	ProgFromContainer = DatapathProgFromContainer
	ProgFromUplink    = DatapathProgFromUplink
	ProgFromUplinkL3  = DatapathProgFromUplinkL3
	ProgStackHooks    = DatapathProgStackHooks
	ProgToContainer   = DatapathProgToContainer
	ProgToLoopback    = DatapathProgToLoopback
	ProgToUplink      = DatapathProgToUplink
	ProgToUplinkL3    = DatapathProgToUplinkL3

	ProgStackDrop = StackDropsProgStackDrop // of stack_drops.c, which is no part of the datapath
)

// Names of the variables (abi.h, stack_drops.c).
const (
	VarConfig      = DatapathVarConfig
	VarStackConfig = StackDropsVarStackConfig
)

// DropStack is the key of drop_limits for what the host's stack drops: DROP_STACK of abi_drop.h.
const DropStack = 63

// Marks in port_marks: enum port_mark of abi.h.
const (
	PortReplies        = 0
	PortForwarded      = 4
	PortForwardedExact = 6
)
