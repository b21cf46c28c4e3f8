package arrival

import "github.com/kvscout/kvscout/protocol/blockkey"

// ceiling plays a source to its end, every request answered at once, and gives
// the share of the prompt tokens that one cache without bounds would hit:
// whole blocks from the front, and never the last token.
func ceiling(s Source) float64 {
	seen := make(map[blockkey.Key]struct{})
	hit, total := 0, 0
	for {
		r, ok := s.Next()
		if !ok {
			break
		}
		n := 0
		for most := (r.Length - 1) / s.BlockSize(); n < most; n++ {
			if _, held := seen[r.Keys[n]]; !held {
				break
			}
		}
		hit += n * s.BlockSize()
		total += r.Length
		for _, k := range r.Keys {
			seen[k] = struct{}{}
		}
		s.Done(r.ID, r.At)
	}
	if total == 0 {
		return 0
	}
	return float64(hit) / float64(total)
}
