package admin

import (
	"slices"

	"github.com/ebpfnet/ebpfnet/loader"
	"github.com/ebpfnet/ebpfnet/loader/rtnl"
	"github.com/ebpfnet/ebpfnet/plugin/config"
	"github.com/ebpfnet/ebpfnet/plugin/link"
)

// Connected returns the names of the containers whose devices are on this host, also without a loaded
// datapath or with one of another version. dataDir is the directory of the records, "" for the default.
func Connected(dataDir string) (containers []string, err error) {
	host, err := rtnl.Open()
	if err != nil {
		return nil, err
	}
	defer host.Close()
	o := &Host{host: host, ends: map[loader.Owner]hostEnd{}}
	if err := o.findEnds(config.DataDir(dataDir)); err != nil {
		return nil, err
	}
	known := map[int]bool{}
	for _, end := range o.ends {
		containers = append(containers, end.title)
		known[end.index] = true
	}
	slices.Sort(containers)
	others, err := o.otherDevices(known)
	return append(containers, others...), err
}

// otherDevices names devices of containers that have their records in another directory.
func (o *Host) otherDevices(known map[int]bool) (devices []string, err error) {
	err = loader.IfLoaded(loader.OpenForRelease, func(datapath *loader.Datapath) error {
		// In every version, an entry begins with the owner and its key is the index.
		var index uint32
		value := make([]byte, datapath.Devices.ValueSize())
		entries := datapath.Devices.Iterate()
		for entries.Next(&index, &value) {
			if known[int(index)] {
				continue
			}
			device, err := link.Device(o.host, int(index))
			if err != nil {
				return err
			}
			if device != nil {
				devices = append(devices, "the one behind "+device.Attrs().Name)
			}
		}
		return entries.Err()
	})
	return devices, err
}
