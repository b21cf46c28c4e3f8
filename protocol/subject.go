package protocol

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strconv"
	"strings"
)

const prefix = "kvscout.v1."

// Kind is what a subject carries.
type Kind uint8

const (
	// Blocks carries deltas.
	Blocks Kind = iota + 1
	// Load carries heartbeats.
	Load
	// Snapshot carries snapshot requests.
	Snapshot
	// Verdict carries what schedulers make of a member.
	Verdict
)

// Subjects names the subjects of one pool.
type Subjects struct {
	base string // "kvscout.v1.<pool>."
}

// NewSubjects checks the pool's name.
func NewSubjects(pool string) (Subjects, error) {
	if err := checkName(pool); err != nil {
		return Subjects{}, fmt.Errorf("pool %.40q: %w", pool, err)
	}
	return Subjects{base: prefix + pool + "."}, nil
}

// Any in place of a member's name stands for all members, and '*' in place of
// a part of a name for every such part: prod_*_* are the members of namespace
// prod, prod_9b2c_* the ranks of one of its pods.
const Any = "*_*_*"

// Blocks is where a member publishes its deltas.
func (s Subjects) Blocks(member string) string { return s.base + "blocks." + tokens(member) }

// Load is where a member publishes its heartbeats.
func (s Subjects) Load(member string) string { return s.base + "load." + tokens(member) }

// Snapshot is where a member is asked for its whole cache state.
func (s Subjects) Snapshot(member string) string { return s.base + "snapshot." + tokens(member) }

// Verdict is where a member's agent is told what a scheduler makes of it.
func (s Subjects) Verdict(member string) string { return s.base + "verdict." + tokens(member) }

// Picks is where schedulers tell each other what they decided.
func (s Subjects) Picks() string { return s.base + "picks" }

// Inbox is the prefix of the subjects on which schedulers are answered.
func (s Subjects) Inbox() string { return s.base + "inbox" }

// tokens writes a member's name as subject tokens, so that rights can be given
// for a namespace or a pod: <namespace>.<pod uid>.<rank>.
func tokens(member string) string {
	if strings.IndexByte(member, '.') >= 0 {
		return member // as Speaker gives them
	}
	first, last := strings.IndexByte(member, '_'), strings.LastIndexByte(member, '_')
	if first == last {
		return member // not a name; nobody speaks for it
	}
	return member[:first] + "." + member[first+1:last] + "." + member[last+1:]
}

// Parse says what a subject carries and of which member.
func (s Subjects) Parse(subject string) (Kind, string, error) {
	rest, ok := strings.CutPrefix(subject, s.base)
	if !ok {
		return 0, "", fmt.Errorf("subject %.80q is not of %s", subject, s.base)
	}
	word, name, _ := strings.Cut(rest, ".")
	var kind Kind
	switch word {
	case "blocks":
		kind = Blocks
	case "load":
		kind = Load
	case "snapshot":
		kind = Snapshot
	case "verdict":
		kind = Verdict
	default:
		return 0, "", fmt.Errorf("subject %.80q: unknown kind", subject)
	}
	namespace, name, _ := strings.Cut(name, ".")
	uid, rank, _ := strings.Cut(name, ".")
	member := namespace + "_" + uid + "_" + rank
	// A '_' in the namespace or the rank would make it another member's name,
	// which is not what the sender has the right to.
	if strings.Contains(namespace, "_") || strings.Contains(rank, "_") {
		return 0, "", fmt.Errorf("subject %.80q: '_' outside the pod uid", subject)
	}
	if err := CheckMember(member); err != nil {
		return 0, "", fmt.Errorf("subject %.80q: %w", subject, err)
	}
	return kind, member, nil
}

// Speaker is what a subject of a Delta or Heartbeat has where a member's name
// belongs: three tokens with dots between, which no name has. Verdict takes them
// as it does a name. ok is false where nobody could be told on them.
func (s Subjects) Speaker(subject string) (tokens string, ok bool) {
	rest, ours := strings.CutPrefix(subject, s.base)
	word, tokens, _ := strings.Cut(rest, ".")
	ok = ours && (word == "blocks" || word == "load") && strings.Count(tokens, ".") == 2 &&
		len(tokens) <= 2*MaxName && !strings.ContainsAny(tokens, "*> ")
	return tokens, ok
}

// Member is one data-parallel rank of one engine, the unit that is scheduled.
type Member struct {
	Namespace string
	PodUID    string
	Rank      uint32
}

const (
	// maxNamespace and maxPodUID bound what Identity leaves of a name in bytes:
	// together with any rank they fit into MaxName.
	maxNamespace, maxPodUID = 63, 120
	// digits of the digest that stands for what Identity took away.
	digits = 8
)

// Identity is the member that a namespace and a pod id, as people give them,
// stand for. What can be part of a member's name stays as it is. Of anything
// else each other character becomes '-', what is too long is cut, and '-' and
// the first 8 hexadecimal digits of the SHA-256 of what was given follow, so
// that two names do not become one member: a.b and a-b, a.b and a_b.
func Identity(namespace, podUID string, rank uint32) Member {
	return Member{Namespace: clean(namespace, maxNamespace, "-"), PodUID: clean(podUID, maxPodUID, "-_"), Rank: rank}
}

// clean makes a part of a name, which may hold letters, digits and also.
func clean(given string, limit int, also string) string {
	cleaned := strings.Map(func(r rune) rune {
		switch {
		case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9', strings.ContainsRune(also, r):
			return r
		}
		return '-'
	}, given)
	if cleaned == given && len(given) <= limit {
		return given
	}
	sum := sha256.Sum256([]byte(given))
	return cleaned[:min(len(cleaned), limit-digits-1)] + "-" + hex.EncodeToString(sum[:])[:digits]
}

// Name is <namespace>_<pod uid>_<rank>. It fails when
// a part holds anything but letters, digits and '-' (the pod uid may hold '_'),
// or when the whole is too long.
func (m Member) Name() (string, error) {
	name := m.Namespace + "_" + m.PodUID + "_" + strconv.FormatUint(uint64(m.Rank), 10)
	back, err := ParseMember(name)
	if err != nil {
		return "", err
	}
	if back != m {
		return "", fmt.Errorf("member %.80q does not lead back to its parts", name)
	}
	return name, nil
}

// ParseMember is the inverse of Name. The namespace ends at the first '_', the
// rank begins after the last.
func ParseMember(name string) (Member, error) {
	if err := checkName(name); err != nil {
		return Member{}, fmt.Errorf("member %.80q: %w", name, err)
	}
	namespace, rest, _ := strings.Cut(name, "_")
	cut := strings.LastIndexByte(rest, '_')
	if namespace == "" || cut < 1 {
		return Member{}, fmt.Errorf("member %.80q is not <namespace>_<pod uid>_<rank>", name)
	}
	digits := rest[cut+1:]
	rank, err := strconv.ParseUint(digits, 10, 32)
	if err != nil || strconv.FormatUint(rank, 10) != digits {
		return Member{}, fmt.Errorf("member %.80q: rank is not a number", name)
	}
	return Member{Namespace: namespace, PodUID: rest[:cut], Rank: uint32(rank)}, nil
}

// CheckMember says what is wrong with a member's name, without allocating when
// nothing is.
func CheckMember(name string) error {
	_, err := ParseMember(name)
	return err
}

// checkName accepts what is safe as one subject token and in logs.
func checkName(s string) error {
	if s == "" {
		return fmt.Errorf("empty")
	}
	if len(s) > MaxName {
		return fmt.Errorf("%d bytes, at most %d", len(s), MaxName)
	}
	for i := range len(s) {
		c := s[i]
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', c == '-', c == '_':
		default:
			return fmt.Errorf("byte %d (%q) is not a letter, digit, '-' or '_'", i, c)
		}
	}
	return nil
}
