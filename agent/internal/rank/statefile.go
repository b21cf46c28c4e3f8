package rank

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/kvscout/kvscout/agent/internal/vllm"
)

// A state file is one rank's cache state at one batch of one incarnation of its engine:
//
//	magic, 8 bytes
//	form, 4 bytes, little-endian
//	size of the head, 4 bytes, little-endian
//	head, JSON
//	the mirror, as mirror.Append wrote it
//	SHA-256 over all before, 32 bytes
const (
	stateMagic = "kvsstate"
	// stateForm rises with every change of head or mirror.Append.
	stateForm = 2
	// maxStateFile is more than a full mirror needs.
	maxStateFile = 256 << 20
	stateFixed   = len(stateMagic) + 4 + 4
	// clockSkew is how far ahead of this clock a file may have been written.
	clockSkew = 24 * time.Hour
)

var errForeign = errors.New("state file of another member or engine")

// stateHead says what a state file is about, and what there is to know beside
// the mirror.
type stateHead struct {
	Member  string `json:"member"` // with the pod's uid and the rank
	Version string `json:"engine_version"`

	Model     string `json:"model"`
	BlockSize int    `json:"block_size"` // as configured
	Reported  int    `json:"reported"`   // by the engine
	Blocks    int    `json:"blocks"`

	Epoch uint64    `json:"epoch"`
	Mark  vllm.Mark `json:"mark"`

	Missing string `json:"doubt,omitempty"`
	Dropped bool   `json:"dropped,omitempty"` // by the mirror, in this incarnation
	Refused bool   `json:"refused,omitempty"`

	// Emptied is what the engine had counted of requests that empty its cache.
	Emptied  Emptied           `json:"emptied"`
	Adapters map[string]string `json:"adapters"` // name -> root
}

// Emptied are an engine's counts of what empties its cache without an event.
type Emptied struct {
	Known  bool    `json:"known"`
	Resets float64 `json:"resets"`
	Sleeps float64 `json:"sleeps"`
}

// EmptiedOf is what a page of metrics says of it.
func EmptiedOf(page vllm.Page) Emptied {
	return Emptied{Known: true, Resets: page.Resets, Sleeps: page.Sleeps}
}

// beginState begins a file whose mirror is still to be appended.
func beginState(dst []byte, head *stateHead) ([]byte, error) {
	text, err := json.Marshal(head)
	if err != nil {
		return nil, err
	}
	dst = append(dst, stateMagic...)
	dst = binary.LittleEndian.AppendUint32(dst, stateForm)
	dst = binary.LittleEndian.AppendUint32(dst, uint32(len(text)))
	return append(dst, text...), nil
}

func endState(file []byte) []byte {
	sum := sha256.Sum256(file)
	return append(file, sum[:]...)
}

// parseState takes a whole file apart. The mirror's part is as it was written,
// which says nothing of whether it ever was true.
func parseState(file []byte) (*stateHead, []byte, error) {
	if len(file) < stateFixed+sha256.Size || string(file[:len(stateMagic)]) != stateMagic {
		return nil, nil, errors.New("not a whole state file")
	}
	if form := binary.LittleEndian.Uint32(file[len(stateMagic):]); form != stateForm {
		return nil, nil, fmt.Errorf("state file of form %d, want %d", form, stateForm)
	}
	body := file[:len(file)-sha256.Size]
	if sum := sha256.Sum256(body); !bytes.Equal(sum[:], file[len(body):]) {
		return nil, nil, errors.New("state file is torn: its checksum differs")
	}
	size := binary.LittleEndian.Uint32(body[stateFixed-4:])
	if uint64(size) > uint64(len(body)-stateFixed) {
		return nil, nil, errors.New("state file has no whole head")
	}
	head := new(stateHead)
	if err := json.Unmarshal(body[stateFixed:stateFixed+int(size)], head); err != nil {
		return nil, nil, fmt.Errorf("read head of the state file: %w", err)
	}
	return head, body[stateFixed+int(size):], nil
}

// check says why a file is not about this rank as it is known.
func (h *stateHead) check(member, version string, id Identity, now Emptied, clock time.Time) error {
	const none = ^uint64(0)
	then := Identity{Model: h.Model, Reported: h.Reported, Blocks: h.Blocks}
	switch {
	case h.Member != member:
		return fmt.Errorf("%w: it is of %q", errForeign, h.Member)
	case h.Epoch > uint64(clock.Add(clockSkew).UnixNano()), h.Mark.Sequence == none:
		return errors.New("state file of the future")
	case h.BlockSize != id.BlockSize, id.differs(then):
		return fmt.Errorf("%w: it is of %+v with block size %d, the engine is %+v", errForeign, then, h.BlockSize, id)
	case h.Version != "" && version != "" && h.Version != version:
		return fmt.Errorf("%w: it is of version %q, the engine's is %q", errForeign, h.Version, version)
	case !h.Emptied.Known || h.Emptied != now:
		return fmt.Errorf("the engine's cache may have been emptied since: %+v, was %+v", now, h.Emptied)
	}
	return nil
}

// readState reads a file that may not be there: fs.ErrNotExist.
func readState(path string) (*stateHead, []byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	file, err := io.ReadAll(io.LimitReader(f, maxStateFile+1))
	if err != nil {
		return nil, nil, err
	}
	if len(file) > maxStateFile {
		return nil, nil, fmt.Errorf("state file is larger than %d bytes", maxStateFile)
	}
	return parseState(file)
}

// writeState replaces a file, which is the old or the new one at any moment,
// also after a fall of the machine.
func writeState(path string, file []byte) (err error) {
	temporary := path + ".tmp"
	f, err := os.OpenFile(temporary, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, ignoreAbsent(os.Remove(temporary)))
		}
	}()
	_, err = f.Write(file)
	if err == nil {
		err = f.Sync()
	}
	if e := f.Close(); err == nil {
		err = e
	}
	if err != nil {
		return err
	}
	if err := os.Rename(temporary, path); err != nil {
		return err
	}
	return syncDir(filepath.Dir(path))
}

func syncDir(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	return dir.Sync()
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
