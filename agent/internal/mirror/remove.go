package mirror

// Remove applies a BlockRemoved event. Hashes that are not known are counted.
func (m *Mirror) Remove(r Remove) {
	if r.Tier > Disk {
		m.stats.UnknownRemoved += uint64(len(r.Hashes))
		return
	}
	for k, hash := range r.Hashes {
		i := m.find(hash)
		done := false
		if i != 0 {
			for _, g := range m.groups {
				if (!r.HasGroup || g.id == r.Group) && m.removeFrom(g, i, r.Tier) {
					done = true
				}
			}
			m.settle(i)
		}
		switch {
		case done:
			m.stats.Removed++
		case r.Tier == GPU || k == len(r.Hashes)-1:
			m.stats.UnknownRemoved++
		}
	}
}

func (m *Mirror) removeFrom(g *group, i int32, t Tier) bool {
	if t == GPU {
		return m.removeCopy(g, i)
	}
	c := g.copies[i]
	if c.tiers&(1<<t) == 0 {
		return false
	}
	c.tiers &^= 1 << t
	m.set(g, i, c)
	return true
}

// Clear applies the loss of a whole tier, in all groups. Other tiers stay.
func (m *Mirror) Clear(t Tier) {
	if t == GPU {
		m.unpin() // an engine with a request under way clears nothing
	}
	m.each(func(i int32) {
		for _, g := range m.groups {
			c := g.copies[i]
			if t == GPU {
				c.sure, c.maybe = 0, 0
			} else {
				c.tiers &^= 1 << t
			}
			m.set(g, i, c)
		}
	})
}

// PurgeAdapter drops all blocks of an adapter: its name stands for other
// weights from here on.
func (m *Mirror) PurgeAdapter(name string) {
	id, ok := m.adapters[name]
	if !ok {
		return
	}
	m.each(func(i int32) {
		if n := &m.nodes[i]; n.has(flagContent) && n.adapter == id {
			for _, g := range m.groups {
				m.set(g, i, copies{})
			}
		}
	})
}

func (m *Mirror) each(visit func(i int32)) {
	for i := 1; i < len(m.nodes); i++ {
		if m.nodes[i].has(flagLive) {
			visit(int32(i))
			m.settle(int32(i))
		}
	}
}

// settle buries a node that lost its last copy, unless it is published: that is
// left to Drain.
func (m *Mirror) settle(i int32) {
	n := &m.nodes[i]
	if n.published != 0 || m.alive(i) {
		return
	}
	if n.has(flagContent) {
		m.bury(i)
	} else {
		m.exorcise(i)
	}
}
