package main

import (
	"context"
	"io"
	"slices"

	cnitypes "github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/ebpfnet/ebpfnet/ipam"
	"github.com/ebpfnet/ebpfnet/plugin/cni"
	"github.com/ebpfnet/ebpfnet/plugin/cnierr"
	"github.com/ebpfnet/ebpfnet/plugin/link"
	"github.com/ebpfnet/ebpfnet/plugin/record"
)

// plugin implements the verbs, cni.Verbs, on package ipam. Beyond host-local's verbs it has GC and
// STATUS, and a crash cannot tear what it writes.
type plugin struct {
	stdout io.Writer
}

// openPool opens the addresses of a network. The calling plugin makes the devices.
func openPool(c *ipam.Config, call *cni.Call) *ipam.Pool {
	return ipam.Open(c, ipam.Options{IndexDir: record.IndexDir(record.DefaultDir), Log: call.Log})
}

func attachment(call *cni.Call) ipam.Attachment {
	return ipam.Attachment{ContainerID: call.ContainerID, IfName: call.IfName}
}

// Add reserves addresses and prints them.
func (p plugin) Add(ctx context.Context, call *cni.Call) error {
	c, err := call.ParseAddresses()
	if err != nil {
		return err
	}
	pool := openPool(c, call)
	reserved, err := pool.Reserve(ctx, attachment(call))
	if err != nil {
		return err
	}
	result := &types100.Result{CNIVersion: types100.ImplementedSpecVersion, Routes: reserved.Routes, DNS: reserved.DNS}
	for _, address := range reserved.Addresses {
		result.IPs = append(result.IPs, cni.IPConfig(address.Prefix, address.Gateway))
	}
	if err := cni.PrintResult(p.stdout, result, call.CNIVersion()); err != nil {
		return cnierr.WithDetails(cnierr.WithCode(err), pool.Release(context.WithoutCancel(ctx), attachment(call)))
	}
	return nil
}

// Del releases what Add reserved.
func (p plugin) Del(ctx context.Context, call *cni.Call) error {
	c, err := call.ParseReservations()
	if err != nil {
		return err
	}
	return openPool(c, call).Release(ctx, attachment(call))
}

// Check fails unless there is a reservation and prevResult, if the call has one, lists it.
func (p plugin) Check(ctx context.Context, call *cni.Call) error {
	c, err := call.ParseAddresses()
	if err != nil {
		return err
	}
	prev, err := call.ParsePrevResult()
	if err != nil {
		return err
	}
	reserved, err := openPool(c, call).Reserved(ctx, attachment(call))
	if err != nil {
		return err
	}
	if len(reserved) == 0 {
		return differs("no address is reserved for the container in " + c.Dir())
	}
	for _, addr := range reserved {
		isReserved := func(ip *types100.IPConfig) bool { return link.PrefixOf(ip.Address).Addr() == addr }
		if prev != nil && !slices.ContainsFunc(prev.IPs, isReserved) {
			return differs(addr.String() + " is reserved for the container and missing from prevResult")
		}
	}
	return nil
}

func differs(message string) error {
	return cnitypes.NewError(cnierr.CodeDiffers, message, "DEL and ADD the container to fix it")
}

// Status fails unless an address is free.
func (p plugin) Status(ctx context.Context, call *cni.Call) error {
	c, err := call.ParseAddresses()
	if err != nil {
		return err
	}
	if err := openPool(c, call).Available(ctx); err != nil {
		return cnierr.NotAvailable(err)
	}
	return nil
}

// GC releases the addresses of attachments that the runtime does not list as valid. Without a list
// it releases nothing.
func (p plugin) GC(ctx context.Context, call *cni.Call) error {
	c, err := call.ParseReservations()
	if err != nil {
		return err
	}
	valid, err := call.ParseValidAttachments()
	if err != nil || valid == nil {
		return err
	}
	return openPool(c, call).Retain(ctx, valid.HasReservation)
}
