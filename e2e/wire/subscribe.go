package wire

import (
	"bufio"
	"fmt"
	"io"
	"net"
)

// Subscriber hears everything that a ZeroMQ publisher sends.
type Subscriber struct {
	conn net.Conn
	done chan struct{}
}

// Subscribe connects to host:port. heard gets the last frame of each message,
// one after the other, until the publisher hangs up or Close.
func Subscribe(address string, heard func(payload []byte)) (*Subscriber, error) {
	conn, err := net.Dial("tcp", address)
	if err != nil {
		return nil, err
	}
	greeting := make([]byte, 64)
	greeting[0], greeting[9], greeting[10] = 0xff, 0x7f, 3
	copy(greeting[12:], "NULL")
	split, in := ZMTP(), bufio.NewReader(conn)
	// libzmq hangs up on a peer that says two things before it was answered.
	for _, said := range []string{string(greeting), "\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB"} {
		_, err := io.WriteString(conn, said)
		if err == nil {
			_, _, err = split(in)
		}
		if err != nil {
			conn.Close()
			return nil, fmt.Errorf("subscribe at %s: %w", address, err)
		}
	}
	if _, err := io.WriteString(conn, "\x00\x01\x01"); err != nil { // to everything
		conn.Close()
		return nil, err
	}
	s := &Subscriber{conn: conn, done: make(chan struct{})}
	go s.run(split, in, heard)
	return s, nil
}

func (s *Subscriber) run(split Split, in *bufio.Reader, heard func([]byte)) {
	defer close(s.done)
	for {
		message, free, err := split(in)
		if err != nil {
			return // closed, by us or with the publisher
		}
		if free {
			heard(lastFrame(message))
		}
	}
}

// Close hangs up and waits until heard is not called any more.
func (s *Subscriber) Close() {
	s.conn.Close()
	<-s.done
}

// lastFrame of a message that ZMTP split off.
func lastFrame(message []byte) []byte {
	var frame []byte
	for len(message) > 0 {
		size, head := int(message[1]), 2
		if message[0]&2 != 0 {
			size, head = 0, 9
			for _, b := range message[1:9] {
				size = size<<8 | int(b)
			}
		}
		frame, message = message[head:head+size], message[head+size:]
	}
	return frame
}
