package mirror

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"

	"github.com/kvscout/kvscout/agent/internal/blockhash"
	"github.com/kvscout/kvscout/protocol/blockkey"
)

// Bits of what is global in a state.
const (
	stateCrowded = 1 << iota
	stateSaltSeen
	stateLossy
	stateNames
	statePassed
	stateOffloads
	stateBits = 1<<iota - 1
)

// keptFlags of a node go into a state; the rest follows from them.
const (
	keptFlags = flagContent | flagRoot | flagWithheld | flagClaimed
	// flatNode is the least that a node takes in a state.
	flatNode = 1 + 8
)

var (
	errState    = errors.New("state of a mirror is cut short or malformed")
	errNotEmpty = errors.New("mirror is not empty")
)

// Append appends everything that the mirror knows, and not what Drain has told
// of it, to dst. Nothing in it says which form it is in: whoever keeps it must.
//
// Call it between two batches: what links the events of one engine step is left
// out.
func (m *Mirror) Append(dst []byte) []byte {
	dst = binary.AppendUvarint(dst, uint64(m.blockSize))
	bits := byte(0)
	if m.crowded {
		bits |= stateCrowded
	}
	if m.saltSeen {
		bits |= stateSaltSeen
	}
	if m.lossy {
		bits |= stateLossy
	}
	if m.names.on {
		bits |= stateNames
	}
	if m.names.passed {
		bits |= statePassed
	}
	if m.offloads {
		bits |= stateOffloads
	}
	dst = append(dst, bits)

	dst = binary.AppendUvarint(dst, uint64(len(m.groups)))
	for _, g := range m.groups {
		dst = binary.AppendUvarint(dst, uint64(g.id))
		dst = append(dst, byte(g.kind))
		dst = binary.AppendUvarint(dst, uint64(g.blockSize))
		dst = binary.AppendUvarint(dst, uint64(g.window))
	}

	names := make([]string, len(m.adapters))
	for name, id := range m.adapters {
		names[id] = name
	}
	dst = binary.AppendUvarint(dst, uint64(len(names)-1)) // the first is no adapter
	for _, name := range names[1:] {
		dst = binary.AppendUvarint(dst, uint64(len(name)))
		dst = append(dst, name...)
	}

	dst = binary.AppendUvarint(dst, uint64(len(m.rootHashes)))
	for key, hash := range m.rootHashes {
		dst = binary.LittleEndian.AppendUint64(dst, uint64(key))
		dst = binary.LittleEndian.AppendUint64(dst, hash)
	}

	// Nodes are numbered without the free ones; a parent is told by how far
	// before its child it comes, which is mostly one.
	number := make([]int32, len(m.nodes))
	for i, next := 1, int32(1); i < len(m.nodes); i++ {
		if m.nodes[i].has(flagLive) {
			number[i] = next
			next++
		}
	}
	dst = binary.AppendUvarint(dst, uint64(m.used))
	for i := 1; i < len(m.nodes); i++ {
		if m.nodes[i].has(flagLive) {
			dst = m.appendNode(dst, int32(i), number)
		}
	}
	if m.names.on {
		found := candidate{}
		if m.names.verified {
			found = m.names.candidates[0]
		}
		for _, text := range []string{found.algorithm, found.seed} {
			dst = append(binary.AppendUvarint(dst, uint64(len(text))), text...)
		}
		dst = binary.AppendUvarint(dst, uint64(len(m.names.tips)))
		for k := range m.names.tips {
			dst = binary.AppendUvarint(dst, uint64(number[m.names.tips[(m.names.tip+k)%len(m.names.tips)]]))
		}
	}
	return dst
}

func (m *Mirror) appendNode(dst []byte, i int32, number []int32) []byte {
	n := &m.nodes[i]
	flags := n.flags & keptFlags
	if !n.has(flagWithheld) {
		flags &^= flagClaimed // found again from the parent
	}
	dst = append(dst, byte(flags))
	dst = binary.LittleEndian.AppendUint64(dst, n.hash)
	if n.has(flagContent) {
		dst = binary.LittleEndian.AppendUint64(dst, n.local)
		dst = binary.AppendUvarint(dst, uint64(n.adapter))
		if n.has(flagRoot) {
			dst = binary.LittleEndian.AppendUint64(dst, n.parentHash)
		} else {
			dst = binary.AppendVarint(dst, int64(number[i]-number[n.parent]))
		}
	}
	if flags&flagClaimed != 0 {
		dst = binary.LittleEndian.AppendUint64(dst, uint64(n.key))
	}
	for _, g := range m.groups {
		c := g.copies[i]
		dst = binary.AppendUvarint(dst, uint64(c.sure))
		dst = binary.AppendUvarint(dst, uint64(c.maybe))
		dst = append(dst, c.tiers)
	}
	if m.names.on {
		dst = append(dst, m.names.digests[i][:]...)
	}
	return dst
}

// Restore fills an empty mirror, one just made or reset, with what Append
// wrote. The next Drain tells all of it. An error leaves the mirror empty; no
// state, whoever wrote it, makes a mirror that contradicts itself or is larger
// than its bound.
func (m *Mirror) Restore(state []byte) error {
	if m.used != 0 || len(m.groups) != 0 || len(m.rootHashes) != 0 || len(m.adapters) != 1 {
		return errNotEmpty
	}
	r := stateReader{data: state}
	err := m.restore(&r)
	if err == nil {
		err = r.err
	}
	if err == nil && len(r.data) != 0 {
		err = fmt.Errorf("%w: %d bytes too many", errState, len(r.data))
	}
	if err != nil {
		m.Reset()
		return err
	}
	m.markAll()
	for i := 1; i < len(m.nodes); i++ { // what had been lost and not been told
		if m.nodes[i].has(flagLive) {
			m.settle(int32(i))
		}
	}
	return nil
}

func (m *Mirror) restore(r *stateReader) error {
	blockSize := int(r.uvarint(maxBlockSize))
	if m.cfg.BlockSize != 0 && blockSize != m.cfg.BlockSize {
		return fmt.Errorf("state of block size %d, want %d", blockSize, m.cfg.BlockSize)
	}
	m.blockSize, m.names.unit = blockSize, blockSize
	bits := r.byte(stateBits)
	named, passed := bits&stateNames != 0, bits&statePassed != 0
	m.offloads = bits&stateOffloads != 0
	m.crowded, m.saltSeen, m.lossy = bits&stateCrowded != 0, bits&stateSaltSeen != 0, bits&stateLossy != 0
	for range r.count(maxGroups, 4) {
		g := &group{
			size: 1, id: int(r.uvarint(math.MaxInt32)), kind: GroupKind(r.byte(7)),
			blockSize: int(r.uvarint(maxBlockSize)), window: int(r.uvarint(math.MaxInt32)),
		}
		if g.kind > Other {
			r.fail()
		}
		if m.group(g.id) != nil {
			return fmt.Errorf("state names group %d twice", g.id)
		}
		m.groups = append(m.groups, g)
	}
	for range r.count(maxAdapters, 1) {
		name := r.text(maxAdapterName)
		if _, twice := m.adapters[name]; twice {
			return fmt.Errorf("state names adapter %q twice", name)
		}
		m.adapters[name] = uint16(len(m.adapters))
	}
	for range r.count(maxRootHashes, 16) {
		key := blockkey.Key(r.uint64())
		m.rootHashes[key] = r.uint64()
	}
	least := flatNode + 3*len(m.groups)
	if named {
		least += len(blockhash.Digest{})
	}
	n := r.count(uint64(m.cfg.MaxNodes), least)
	if r.err != nil {
		return r.err
	}
	m.nodes = append(make([]node, 0, n+1), node{})
	for _, g := range m.groups {
		g.copies = make([]copies, 1, n+1)
	}
	var digests []blockhash.Digest
	if named {
		digests = make([]blockhash.Digest, 1, n+1)
	}
	for range n {
		if m.restoreNode(r, n); r.err != nil {
			return r.err
		}
		if named {
			var digest blockhash.Digest
			copy(digest[:], r.take(len(digest)))
			digests = append(digests, digest)
		}
	}
	m.link()
	if len(m.groups) > 0 {
		m.judge()
	}
	if m.outgrown != "" {
		return fmt.Errorf("%w: %s", errState, m.outgrown)
	}
	if !named {
		return r.err
	}
	if !m.names.on {
		r.fail()
		return r.err
	}
	m.names.digests, m.names.passed = digests, passed
	algorithm, seed := r.text(maxAdapterName), r.text(maxAdapterName)
	if h, err := blockhash.New(algorithm, seed, m.cfg.Rule.Tagged); err == nil {
		m.names.candidates, m.names.sought, m.names.verified = []candidate{{algorithm, seed, h}}, true, true
	}
	for range r.count(maxTips, 1) {
		if i := int32(r.uvarint(uint64(n))); i > 0 {
			m.pin(i)
		}
	}
	return nil
}

// restoreNode reads the next node. Its parent may come later and is only
// numbered.
func (m *Mirror) restoreNode(r *stateReader, total int) {
	flags := uint16(r.byte(byte(keptFlags)))
	i := int32(len(m.nodes))
	n := node{hash: r.uint64(), parent: detached}
	switch {
	case flags&flagContent == 0 && flags != 0, flags&flagClaimed != 0 && flags&flagWithheld == 0, m.blockSize == 0 && flags != 0:
		r.fail()
	case flags&flagContent != 0:
		n.local = r.uint64()
		n.adapter = uint16(r.uvarint(uint64(len(m.adapters) - 1)))
		if flags&flagRoot != 0 {
			n.parentHash, n.parent = r.uint64(), 0
			break
		}
		if parent := int64(i) - r.varint(); parent < 1 || parent > int64(total) {
			r.fail()
		} else {
			n.parent = int32(parent)
		}
	}
	if flags&flagClaimed != 0 {
		if n.key = blockkey.Key(r.uint64()); n.key == 0 {
			r.fail()
		}
	}
	n.flags = flags&^flagClaimed | flagLive
	if r.err != nil {
		return
	}
	if m.find(n.hash) != 0 {
		r.fail()
		return
	}
	m.used++
	m.nodes = append(m.nodes, n)
	m.byHash.put(n.hash, i)
	for _, g := range m.groups {
		g.copies = append(g.copies, copies{})
		c := copies{sure: uint16(r.uvarint(math.MaxUint16)), maybe: uint16(r.uvarint(math.MaxUint16)), tiers: r.byte(onHost | onDisk)}
		if r.err == nil {
			m.set(g, i, c)
		}
	}
}

// link hangs the nodes below their parents and registers the keys that blocks
// hold although they are withheld.
func (m *Mirror) link() {
	for k := range m.nodes[1:] {
		n := &m.nodes[k+1]
		if !n.has(flagContent) {
			continue
		}
		parent := n.parent
		if parent > 0 {
			n.parentHash = m.nodes[parent].hash
		}
		m.attach(int32(k+1), parent)
	}
	for k := range m.nodes[1:] {
		if m.nodes[k+1].key != 0 {
			m.claim(int32(k + 1))
		}
	}
}

// stateReader reads a state; after the first error everything is 0.
type stateReader struct {
	data []byte
	err  error
}

func (r *stateReader) fail() {
	r.data = nil
	if r.err == nil {
		r.err = errState
	}
}

func (r *stateReader) take(n int) []byte {
	if r.err != nil || n > len(r.data) {
		r.fail()
		return nil
	}
	taken := r.data[:n]
	r.data = r.data[n:]
	return taken
}

// byte reads one in which only the bits of most are set, or that is at most
// most: all bounds here are of both kinds.
func (r *stateReader) byte(most byte) byte {
	b := r.take(1)
	if b == nil {
		return 0
	}
	if b[0]&^most != 0 {
		r.fail()
		return 0
	}
	return b[0]
}

func (r *stateReader) uint64() uint64 {
	if b := r.take(8); b != nil {
		return binary.LittleEndian.Uint64(b)
	}
	return 0
}

func (r *stateReader) uvarint(most uint64) uint64 {
	v, n := binary.Uvarint(r.data)
	if n <= 0 || v > most {
		r.fail()
		return 0
	}
	r.data = r.data[n:]
	return v
}

func (r *stateReader) varint() int64 {
	v, n := binary.Varint(r.data)
	if n <= 0 {
		r.fail()
		return 0
	}
	r.data = r.data[n:]
	return v
}

// count reads how many pieces of at least the given size follow: never more
// than there are bytes for.
func (r *stateReader) count(most uint64, size int) int {
	n := r.uvarint(most)
	if n > uint64(len(r.data)/size) {
		r.fail()
		return 0
	}
	return int(n)
}

func (r *stateReader) text(most uint64) string {
	return string(r.take(int(r.uvarint(most))))
}
