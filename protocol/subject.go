package protocol

import (
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

// Snapshot is where a member is asked for its whole picture.
func (s Subjects) Snapshot(member string) string { return s.base + "snapshot." + tokens(member) }

// Picks is where schedulers tell each other what they decided.
func (s Subjects) Picks() string { return s.base + "picks" }

// Inbox is the prefix of the subjects on which schedulers are answered.
func (s Subjects) Inbox() string { return s.base + "inbox" }

// tokens writes a member's name as subject tokens, so that rights can be given
// for a namespace or a pod: <namespace>.<pod uid>.<rank>.
func tokens(member string) string {
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

// Member is one data-parallel rank of one engine, the unit that is scheduled.
type Member struct {
	Namespace string
	PodUID    string
	Rank      uint32
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
