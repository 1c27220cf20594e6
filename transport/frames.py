"""Which messages travel as control frames, and their version.

The messages themselves are adaptivespec.messages: what the controller says is the same in process
and between processes. Raise PROTOCOL_VERSION whenever one of them, or the layout of a tensor on the
link, changes: two sides of different versions refuse each other at the handshake.
"""

from adaptivespec.messages import DraftMessage, DraftReply, TargetMessage, TargetReply

PROTOCOL_VERSION = 3

TO_TARGET, FROM_TARGET = TargetMessage, TargetReply
TO_DRAFT, FROM_DRAFT = DraftMessage, DraftReply
