package conformance

import "github.com/containernetworking/cni/pkg/types"

// The specification's error codes under short names, for tables.
const (
	codeIncompatible  = types.ErrIncompatibleCNIVersion
	codeUnsupported   = types.ErrUnsupportedField
	codeInvalidEnv    = types.ErrInvalidEnvironmentVariables
	codeDecoding      = types.ErrDecodingFailure
	codeInvalidConfig = types.ErrInvalidNetworkConfig
	codeInvalidNetNS  = types.ErrInvalidNetNS
	codeTryAgain      = types.ErrTryAgainLater
	codeNotAvailable  = types.ErrPluginNotAvailable
	codeIO            = types.ErrIOFailure
	codeInternal      = types.ErrInternal
)
