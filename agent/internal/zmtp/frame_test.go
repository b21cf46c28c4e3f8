package zmtp

import (
	"bytes"
	"encoding/hex"
	"strings"
	"testing"
)

func TestBytesOnTheWire(t *testing.T) {
	long := bytes.Repeat([]byte{'x'}, 256)
	for name, c := range map[string]struct {
		got  []byte
		want string
	}{
		"greeting": {greeting(),
			"ff00000000000000017f 0301 4e554c4c" + strings.Repeat("00", 16+1+31)},
		"READY of a SUB": {appendReady(nil, SUB),
			"04 19 05 5245414459 0b 536f636b65742d54797065 00000003 535542"},
		"READY of a DEALER": {appendReady(nil, DEALER),
			"04 1c 05 5245414459 0b 536f636b65742d54797065 00000006 4445414c4552"},
		"subscription to everything": {appendMessage(nil, []byte{1}), "00 01 01"},
		"subscription to kv":         {appendMessage(nil, []byte("\x01kv")), "00 03 01 6b76"},
		"replay request": {appendMessage(nil, nil, []byte{0, 0, 0, 0, 0, 0, 0, 7}),
			"01 00 00 08 0000000000000007"},
		"longest short frame": {appendMessage(nil, long[:255]), "00 ff" + strings.Repeat("78", 255)},
		"shortest long frame": {appendMessage(nil, long, nil), "03 0000000000000100" + strings.Repeat("78", 256) + "00 00"},
		"PONG":                {appendCommand(nil, "PONG", 'a', 'b'), "04 07 04 504f4e47 6162"},
		"long command":        {appendCommand(nil, "X", long...), "06 0000000000000102 01 58" + strings.Repeat("78", 256)},
	} {
		want, err := hex.DecodeString(strings.ReplaceAll(c.want, " ", ""))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(c.got, want) {
			t.Errorf("%s:\n got %x\nwant %x", name, c.got, want)
		}
	}
	if n := len(greeting()); n != greetingSize {
		t.Errorf("greeting is %d bytes", n)
	}
}
