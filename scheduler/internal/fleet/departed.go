package fleet

import "time"

const (
	// moment is how long after its last member left a name is still one that may
	// be served again: as long as a pod takes that is replaced.
	moment = 10 * time.Minute
	// maxDeparted bounds the names that are remembered.
	maxDeparted = 1024
)

// departed are names that members served which left, and when. A name that
// others serve may be among them.
type departed map[string]time.Time

func (d departed) add(i *Info, now time.Time) {
	for _, name := range i.Models {
		d.put(name, now)
	}
	for _, a := range i.Adapters {
		d.put(a.Name, now)
	}
}

// put remembers a name. Where there are too many it forgets those that are old,
// and failing that any other one.
func (d departed) put(name string, now time.Time) {
	if _, known := d[name]; !known && len(d) >= maxDeparted {
		for other, at := range d {
			if now.Sub(at) > moment {
				delete(d, other)
			}
		}
		for other := range d {
			if len(d) < maxDeparted {
				break
			}
			delete(d, other)
		}
	}
	d[name] = now
}

// Departed tells whether a member that served the name left a moment ago.
func (f *Fleet) Departed(name string, now time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	at, ok := f.departed[name]
	return ok && now.Sub(at) <= moment
}
