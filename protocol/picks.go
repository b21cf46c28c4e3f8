package protocol

import (
	"fmt"
	"math"

	"github.com/kvscout/kvscout/protocol/pb"
)

// ReadPicks decodes and checks what another scheduler tells.
func ReadPicks(data []byte) (*pb.Picks, error) {
	p := new(pb.Picks)
	if err := unmarshal(data, p); err != nil {
		return nil, fmt.Errorf("decode picks: %w", err)
	}
	if err := checkVersion(p.GetVersion()); err != nil {
		return nil, fmt.Errorf("picks: %w", err)
	}
	if err := checkPicks(p); err != nil {
		return nil, fmt.Errorf("picks %d: %w", p.GetSequence(), err)
	}
	return p, nil
}

func checkPicks(p *pb.Picks) error {
	switch {
	case p.GetSender() == 0 || p.GetSequence() == 0:
		return fmt.Errorf("sender %#x, sequence %d", p.GetSender(), p.GetSequence())
	case len(p.GetName()) > MaxName:
		return fmt.Errorf("name of %d bytes, at most %d", len(p.GetName()), MaxName)
	case len(p.GetReservations()) > MaxPicks || len(p.GetEnds()) > MaxPicks:
		return fmt.Errorf("%d reservations and %d ends, at most %d", len(p.GetReservations()), len(p.GetEnds()), MaxPicks)
	}
	for i, c := range p.GetReservations() {
		if err := checkReservation(c); err != nil {
			return fmt.Errorf("reservation %d: %w", i, err)
		}
	}
	for i, e := range p.GetEnds() {
		if e.GetDecision() == 0 || e.GetKind() < pb.End_KIND_FIRST_TOKEN || e.GetKind() > pb.End_KIND_CANCELLED {
			return fmt.Errorf("end %d: decision %#x, %v", i, e.GetDecision(), e.GetKind())
		}
		if e.GetMember() != "" {
			if err := CheckMember(e.GetMember()); err != nil {
				return fmt.Errorf("end %d: %w", i, err)
			}
		}
	}
	return nil
}

func checkReservation(c *pb.Reservation) error {
	if c.GetDecision() == 0 {
		return fmt.Errorf("no decision")
	}
	if err := CheckMember(c.GetMember()); err != nil {
		return err
	}
	if c.GetDecode() != "" {
		if err := CheckMember(c.GetDecode()); err != nil {
			return err
		}
	}
	for _, v := range []float64{c.GetPrefillMs(), c.GetFirstTokenMs(), c.GetShare(), c.GetEndMs()} {
		if !(v >= 0 && v <= math.MaxFloat64) {
			return fmt.Errorf("time or share %v", v)
		}
	}
	if len(c.GetMarks()) > MaxMarks || len(c.GetMarks()) > 0 && c.GetMarkStride() == 0 {
		return fmt.Errorf("%d marks, at most %d, every %d blocks", len(c.GetMarks()), MaxMarks, c.GetMarkStride())
	}
	for _, k := range c.GetMarks() {
		if k == 0 {
			return fmt.Errorf("a mark is 0")
		}
	}
	return nil
}
