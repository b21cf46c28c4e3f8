package profile

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// maxAxis bounds the lengths of one table.
const maxAxis = 64

// file is the form on disk: YAML, and so JSON too.
type file struct {
	Profiles []entry `yaml:"profiles"`
}

type entry struct {
	Namespace string     `yaml:"namespace"`
	Workload  string     `yaml:"workload"`
	Model     string     `yaml:"model"`
	GPU       string     `yaml:"gpu"`
	Cost      number     `yaml:"cost"` // for autoscalers; not used here
	Created   number     `yaml:"created"`
	Indexes   [][]number `yaml:"indexes"`
	Tputs     [][]number `yaml:"tputs"`
	E2E       [][]number `yaml:"e2e"`
	TTFT      [][]number `yaml:"ttft"`
	TPOT      [][]number `yaml:"tpot"`
	SLOs      slos       `yaml:"slos"`
}

type slos struct {
	Percentile number `yaml:"percentile"`
	Tput       number `yaml:"tput"`
	TT         number `yaml:"tt"`
	E2E        number `yaml:"e2e"`
	TTFT       number `yaml:"ttft"`
	TPAT       number `yaml:"tpat"`
	TPOT       number `yaml:"tpot"`
}

// number is positive and finite, or NaN for all that says nothing.
type number float64

// UnmarshalYAML takes what programs write for a number that is none, too.
func (n *number) UnmarshalYAML(node *yaml.Node) error {
	*n = number(math.NaN())
	if node.Kind != yaml.ScalarNode {
		return fmt.Errorf("line %d: want a number", node.Line)
	}
	if node.Tag == "!!null" {
		return nil
	}
	v, err := strconv.ParseFloat(node.Value, 64) // NaN and Infinity as well
	if err != nil && node.Decode(&v) != nil {    // .nan and .inf
		return fmt.Errorf("line %d: %.40q is no number", node.Line, node.Value)
	}
	if v > 0 && v <= math.MaxFloat64 {
		*n = number(v)
	}
	return nil
}

// Parse reads the profiles of one file. name is for errors, which name the key
// that is wrong.
func Parse(name string, text []byte) ([]*Profile, error) {
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	var f file
	if err := d.Decode(&f); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: %w: %w", name, ErrInvalid, err)
	}
	if err := d.Decode(&file{}); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s: more than one document: %w", name, ErrInvalid)
	}
	var list []*Profile
	for i := range f.Profiles {
		p, err := f.Profiles[i].profile()
		if err != nil {
			return nil, fmt.Errorf("%s: profiles[%d].%w: %w", name, i, err, ErrInvalid)
		}
		list = append(list, p)
	}
	return list, nil
}

func (e *entry) profile() (*Profile, error) {
	p := &Profile{
		Key: Key{Namespace: e.Namespace, Workload: e.Workload, Model: e.Model, GPU: e.GPU},
		Targets: Targets{
			TTFT: e.SLOs.TTFT.orZero(), TPOT: e.SLOs.TPOT.orZero(), TPAT: e.SLOs.TPAT.orZero(), E2E: e.SLOs.E2E.orZero(),
		},
		Created: int64(e.Created.orZero()),
	}
	if e.Model == "" {
		return nil, errors.New("model is missing")
	}
	if kind, name, ok := strings.Cut(e.Workload, "/"); e.Workload != "" && (!ok || kind == "" || name == "") {
		return nil, fmt.Errorf("workload: %.80q is not kind/name", e.Workload)
	}
	if len(e.Indexes) != 2 {
		return nil, errors.New("indexes: want two lists, output tokens and input tokens")
	}
	for i, axis := range []*[]float64{&p.Outputs, &p.Inputs} {
		if n := len(e.Indexes[i]); n == 0 || n > maxAxis {
			return nil, fmt.Errorf("indexes[%d]: %d lengths, want 1 to %d", i, n, maxAxis)
		}
		for j, v := range e.Indexes[i] {
			if !(v > 0) || j > 0 && !(float64(v) > (*axis)[j-1]) {
				return nil, fmt.Errorf("indexes[%d][%d]: lengths must be positive and rising", i, j)
			}
			*axis = append(*axis, float64(v))
		}
	}
	p.cells = make([]Cell, len(p.Outputs)*len(p.Inputs))
	for i := range p.cells {
		p.cells[i] = Unknown()
	}
	for _, t := range []struct {
		key   string
		table [][]number
		at    func(*Cell) *float64
	}{
		{"tputs", e.Tputs, func(c *Cell) *float64 { return &c.RPS }},
		{"e2e", e.E2E, func(c *Cell) *float64 { return &c.E2E }},
		{"ttft", e.TTFT, func(c *Cell) *float64 { return &c.TTFT }},
		{"tpot", e.TPOT, func(c *Cell) *float64 { return &c.TPOT }},
	} {
		if len(t.table) > len(p.Outputs) {
			return nil, fmt.Errorf("%s: %d rows for %d output lengths", t.key, len(t.table), len(p.Outputs))
		}
		for i, row := range t.table {
			if len(row) > len(p.Inputs) {
				return nil, fmt.Errorf("%s[%d]: %d cells for %d input lengths", t.key, i, len(row), len(p.Inputs))
			}
			for j, v := range row {
				*t.at(&p.cells[i*len(p.Inputs)+j]) = v.orNaN()
			}
		}
	}
	return p, nil
}

func (n number) orZero() float64 {
	if n > 0 {
		return float64(n)
	}
	return 0
}

// orNaN: 0 is what a cell has that the file did not set.
func (n number) orNaN() float64 {
	if n > 0 {
		return float64(n)
	}
	return math.NaN()
}
