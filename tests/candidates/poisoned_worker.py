"""A worker that answers with its process id and says that its device is poisoned."""

import os
import sys
from multiprocessing.connection import Connection

from deeptwin.parity.protocol import Reply, pack

if __name__ == "__main__":
    inbox = Connection(int(sys.argv[1]), writable=False)
    outbox = Connection(int(sys.argv[2]), readable=False)
    while True:
        inbox.recv_bytes()
        outbox.send_bytes(pack(Reply(status="error", message=str(os.getpid()), poisoned=True)))
