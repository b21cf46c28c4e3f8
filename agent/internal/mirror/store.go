package mirror

import "github.com/kvscout/kvscout/protocol/blockkey"

// Store applies a BlockStored event.
func (m *Mirror) Store(s Store) {
	if !s.valid() {
		m.stats.Refused++
		return
	}
	g := m.learnGroup(&s)
	if g == nil {
		m.stats.UnknownStored += uint64(len(s.Hashes))
		return
	}
	if s.Tier != GPU {
		m.storeBelow(g, &s)
		return
	}
	switch {
	case m.names.on:
		if m.outgrown == "" && g.kind != Other && s.BlockSize > 0 && s.BlockSize%m.blockSize == 0 {
			real := m.real(&s)
			m.name(&s)
			m.storeSparse(g, &s, real)
		}
	case g.kind == Full, g.kind == Unspecified && (len(m.groups) == 1 || s.dense()):
		m.storeFull(g, &s)
	case g.kind != Other && s.BlockSize == g.blockSize:
		m.storeSparse(g, &s, m.real(&s))
	}
	if m.suspects > maxSuspects {
		m.dropSuspects()
	}
}

func (s *Store) valid() bool {
	return s.Group >= 0 && s.Tier <= Disk && s.Kind <= Other && s.BlockSize >= 0 && s.BlockSize <= maxBlockSize
}

// dense says that all blocks whose tokens a store tells are announced.
func (s *Store) dense() bool {
	return len(s.Hashes) > 0 && len(s.Tokens) == len(s.Hashes)*s.BlockSize
}

// storeFull adds blocks with their content.
func (m *Mirror) storeFull(g *group, s *Store) {
	n := len(s.Hashes)
	if n == 0 && len(s.Tokens) == 0 {
		return
	}
	if n == 0 || s.BlockSize == 0 || len(s.Tokens) != n*s.BlockSize || s.Refs != nil && len(s.Refs) != n {
		m.stats.Refused++
		return
	}
	if s.BlockSize != m.blockSize && s.BlockSize == g.blockSize && s.BlockSize%m.blockSize == 0 {
		m.storeSparse(g, s, m.real(s)) // a finer group names its blocks
		return
	}
	if s.BlockSize != m.blockSize {
		m.stats.Refused++
		return
	}
	adapter, named := m.adapter(s.Adapter)
	withhold := s.Withhold || !named

	at := int32(0)
	link := s.Parent
	flags := flagContent
	if s.HasParent {
		if at = m.lookup(s.Parent); at == 0 {
			m.drop(n)
			return
		}
		m.verify(at)
	} else {
		link = uint64(blockkey.Scope{Model: m.cfg.Model, Adapter: s.Adapter, Salt: s.Salt, BlockSize: m.blockSize}.Root())
		flags |= flagRoot
	}

	above, real := at, m.real(s)
	for k, hash := range s.Hashes {
		var refs []blockkey.Ref
		if s.Refs != nil {
			refs = s.Refs[k]
		}
		local := blockkey.Local(s.Tokens[k*s.BlockSize:(k+1)*s.BlockSize], refs)
		i := m.lookup(hash)
		if i == 0 {
			m.drop(n - k)
			break
		}
		known := g.copies[i]
		block := node{parentHash: link, local: local, adapter: adapter, flags: flags}
		m.describe(i, at, &block, withhold)
		if flags&flagRoot != 0 && s.HidesExtras {
			m.checkRoot(i)
		}
		if real || known.sure == 0 && known.maybe == 0 {
			m.addCopy(g, i)
		} else {
			m.stats.Repeated++
			m.addSuspect(g, i)
		}
		m.stats.Stored++
		at, link, flags = i, hash, flagContent
	}
	if above > 0 {
		m.exorcise(above)
	}
}

// describe gives a node its content, or compares it with what is known of it.
func (m *Mirror) describe(i, parent int32, block *node, withhold bool) {
	n := &m.nodes[i]
	if !n.has(flagContent) {
		n.parentHash, n.local, n.adapter = block.parentHash, block.local, block.adapter
		if m.names.on && m.copied(i) {
			m.names.unnamed--
		}
		n.flags |= block.flags
		m.attach(i, parent)
		m.mark(i)
	} else if n.local != block.local || n.parentHash != block.parentHash || n.adapter != block.adapter ||
		n.flags&flagRoot != block.flags&flagRoot {
		m.stats.Contradictions++
		withhold = true
	}
	if withhold {
		m.withhold(i)
	}
}

// withhold keeps a block from being published while its node lives.
func (m *Mirror) withhold(i int32) {
	m.nodes[i].flags |= flagWithheld
	m.mark(i)
}

// checkRoot guards engines that hide salts: the first hash seen for a root block
// is the plain one, another hash of the same tokens shows that salts are in
// use, and from then on an unseen root block could be salted.
func (m *Mirror) checkRoot(i int32) {
	n := &m.nodes[i]
	if n.has(flagWithheld) {
		return
	}
	key := blockkey.Chain(blockkey.Key(n.parentHash), n.local)
	switch first, ok := m.rootHashes[key]; {
	case ok && first == n.hash:
	case ok:
		m.stats.Contradictions++
		m.saltSeen = true
		m.withhold(i)
	case m.saltSeen || len(m.rootHashes) == maxRootHashes:
		m.withhold(i)
	default:
		m.rootHashes[key] = n.hash
	}
}

// storeSparse adds the blocks that a group keeps which does not need the whole
// prefix. They have no content of their own here: the full group tells it.
func (m *Mirror) storeSparse(g *group, s *Store, real bool) {
	for k, hash := range s.Hashes {
		i := m.lookup(hash)
		if i == 0 {
			m.drop(len(s.Hashes) - k)
			return
		}
		if m.names.on && !m.nodes[i].has(flagContent) {
			m.stats.Unnamed++
		}
		if c := g.copies[i]; real || g.full() && c.sure == 0 && c.maybe == 0 {
			m.addCopy(g, i)
		} else {
			m.stats.Repeated++
			m.addSuspect(g, i)
		}
		m.stats.Stored++
	}
}

// real says whether a store is of copies for certain, and not perhaps the report
// of a hit. What is real in one group is real in all of its call.
func (m *Mirror) real(s *Store) bool {
	if g := m.group(s.Group); s.HasParent || s.Physical || g != nil && s.BlockSize < g.blockSize {
		return true // hits are reported in whole blocks
	}
	c := call{group: s.Group, tokens: len(s.Tokens), print: blockkey.Local(s.Tokens, nil)}
	if last := &m.call; last.group < c.group && last.tokens == c.tokens && last.print == c.print {
		c.real = last.real
	}
	c.real = c.real || !m.mayBeHit(s)
	m.call = c
	return c.real
}

// mayBeHit says whether a hit could have ended at the last block of a root
// store. A report names every block of the hit; and all groups accept the hit.
// Where blocks were lost from sight, any could be.
func (m *Mirror) mayBeHit(s *Store) bool {
	n := len(s.Hashes)
	if s.BlockSize > 0 && len(s.Tokens) > n*s.BlockSize {
		return false
	}
	if m.lossy || n == 0 {
		return true
	}
	last := int32(0)
	for _, hash := range s.Hashes {
		if last = m.find(hash); last == 0 {
			return false
		}
	}
	if m.blockSize == 0 || s.BlockSize%m.blockSize != 0 {
		return true
	}
	hit := uint32(n * s.BlockSize / m.blockSize)
	if hit%m.align != 0 {
		return false
	}
	for _, g := range m.groups {
		if hit%g.size != 0 {
			continue // a hit inside of a block
		}
		need := 0 // of a group whose rule is not known
		switch {
		case g.full():
			need = int(hit / g.size)
		case g.tail != nil && !g.prefix:
			need = m.reach(g, hit)
		}
		at := last
		for ; need > 0 && at > 0; need-- {
			if c := g.copies[at]; c.sure == 0 && c.maybe == 0 {
				return false
			}
			at = m.above(at, g.size)
		}
		if g.drops && g.size == 1 && !m.anyBelow(g, last) {
			return false
		}
	}
	return true
}

// anyBelow says whether a group may have a copy of any block that follows one:
// where hits drop a block, there must be one to drop.
func (m *Mirror) anyBelow(g *group, i int32) bool {
	for c := m.nodes[i].child; c != 0; c = m.nodes[c].next {
		if c := g.copies[c]; c.sure > 0 || c.maybe > 0 {
			return true
		}
	}
	return false
}

// storeBelow adds copies on host or disk. They are joined by hash, whether or
// not the event carries tokens. Several blocks in one event are one unit of
// transfer, found again only by its last block.
func (m *Mirror) storeBelow(g *group, s *Store) {
	if len(s.Hashes) == 0 {
		return
	}
	m.offloads = true
	i := m.find(s.Hashes[len(s.Hashes)-1])
	if i == 0 || !m.alive(i) {
		m.stats.UnknownStored++
		return
	}
	c := g.copies[i]
	c.tiers |= 1 << s.Tier
	m.set(g, i, c)
	m.stats.Stored++
}

// adapter returns the number of an adapter's name; ok is false for names that
// are not kept.
func (m *Mirror) adapter(name string) (id uint16, ok bool) {
	if name == "" {
		return 0, true
	}
	if id, ok := m.adapters[name]; ok {
		return id, true
	}
	if len(name) > maxAdapterName || len(m.adapters) > maxAdapters {
		return 0, false
	}
	id = uint16(len(m.adapters))
	m.adapters[name] = id
	return id, true
}

func (m *Mirror) drop(blocks int) {
	m.stats.Dropped += uint64(blocks)
	m.lossy = true
}
