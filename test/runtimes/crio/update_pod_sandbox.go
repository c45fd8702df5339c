package adaptation

import (
	"context"
	"errors"
)

// UpdatePodSandboxRequest is of a version between 0.9.0 and 0.10.0, which CRI-O 1.34.0 is made for and the checksum
// database lacks. No pod of the tests is updated.
type UpdatePodSandboxRequest struct {
	Pod                                    *PodSandbox
	OverheadLinuxResources, LinuxResources *LinuxResources
}

func (*Adaptation) UpdatePodSandbox(context.Context, *UpdatePodSandboxRequest) (any, error) {
	return nil, errors.New("update a pod's resources: not in NRI 0.9.0")
}
