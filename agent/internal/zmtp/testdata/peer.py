"""A real libzmq socket for the tests.

    peer.py pub bind|connect ENDPOINT [name=value ...]
    peer.py router ENDPOINT [name=value ...]

It prints "at ENDPOINT" once its socket is up and leaves when stdin ends.

A pub sends one-frame messages, so that the subscriber can tell when its
subscription has arrived, until it reads "go". Then it sends count messages
[topic][number, 8 bytes big-endian][payload of size bytes] and prints "sent";
behind the topic there may be more frames of 200 bytes (parts).
With several topics the messages take turns, and so do the one-frame messages.
With a window it waits, before each further window's worth of messages from the
third on, for a line.

A router answers [empty][number] with all messages from that number on, as
[empty][topic][number][payload], and then [empty][empty][ff * 8][empty].
"""

import select
import sys

import zmq

ENDS = b"\xff" * 8


def payload(number, size):
    word = number.to_bytes(8, "big")
    return (word * (size // 8 + 1))[:size]


def pub(sock, opt):
    topics = opt["topics"].encode().split(b",")
    while True:
        turn = 0
        while not select.select([sys.stdin], [], [], 0.002)[0]:
            sock.send(topics[turn % len(topics)])
            turn += 1
        if sys.stdin.readline() != "go\n":
            return
        size, window = int(opt["size"]), int(opt["window"])
        more = [b"x" * 200] * int(opt["parts"])
        for n in range(int(opt["count"])):
            if window and n >= 2 * window and n % window == 0:
                sys.stdin.readline()
            frames = [topics[n % len(topics)], *more, n.to_bytes(8, "big"), payload(n, size)]
            sock.send_multipart(frames, copy=size < 65536)
        print("sent", flush=True)


def router(sock, opt):
    poller = zmq.Poller()
    poller.register(sock, zmq.POLLIN)
    poller.register(sys.stdin, zmq.POLLIN)
    while True:
        events = dict(poller.poll())
        if sys.stdin.fileno() in events:
            return
        identity, empty, start = sock.recv_multipart()
        assert empty == b"", empty
        for n in range(int.from_bytes(start, "big"), int(opt["count"])):
            body = payload(n, int(opt["size"]))
            sock.send_multipart([identity, b"", b"kv", n.to_bytes(8, "big"), body])
        sock.send_multipart([identity, b"", b"", ENDS, b""])


def main():
    kind, args = sys.argv[1], sys.argv[2:]
    opt = dict(hwm="100000", topics="kv", count="0", size="8", window="0", parts="0", heartbeat="0", timeout="0", ttl="0", plain="")
    opt.update(a.split("=", 1) for a in args if "=" in a)
    context = zmq.Context()
    sock = context.socket(zmq.PUB if kind == "pub" else zmq.ROUTER)
    sock.set_hwm(int(opt["hwm"]))
    sock.linger = 0
    if opt["plain"]:
        sock.plain_server = True
    if int(opt["heartbeat"]):
        sock.heartbeat_ivl = int(opt["heartbeat"])
        sock.heartbeat_timeout = int(opt["timeout"])
        sock.heartbeat_ttl = int(opt["ttl"])
    if kind == "pub" and args[0] == "connect":
        sock.connect(args[1])
    else:
        sock.bind(args[1] if kind == "pub" else args[0])
    print("at", sock.last_endpoint.decode().rstrip("\0"), flush=True)
    (pub if kind == "pub" else router)(sock, opt)
    sock.close()
    context.term()


main()
