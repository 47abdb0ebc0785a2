"""The filter of system calls of a sandbox, as a program for the kernel's packet filter (seccomp).

It refuses what programs don't need and kernels have been broken through, what reaches into other processes, and memory
that belongs to no process, so that nothing could weigh it. Sockets have such memory, so they are local and small.
"""

import errno
import struct

_COLUMNS = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # of the tables below, and the number in audit.h
# fmt: off
_DENIED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "syslog": (103, 116),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "setns": (308, 268),
    "unshare": (272, 97), "open_by_handle_at": (304, 265), "move_mount": (429, 429), "open_tree": (428, 428),
    "fsopen": (430, 430),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
}
# fmt: on
_SOCKET, _SETSOCKOPT = (41, 198), (54, 208)
_AF_UNIX, _SO_SNDBUF, _SO_RCVBUF = 1, 7, 8

_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_KILL, _REFUSE, _ALLOW = 0x80000000, 0x00050000 | errno.EPERM, 0x7FFF0000
_NUMBER, _ARCHITECTURE, _FIRST, _THIRD = 0, 4, 16, 32  # offsets of what the filter is shown, arguments among it
_X32 = 0x40000000  # where the same calls have other numbers


def syscall_filter(machine: str) -> bytes:
    """Return the filter for a processor of `uname -m`, by which calls fail with EPERM; KeyError if unknown."""
    column, audit = _COLUMNS[machine]
    program = [(_LOAD, 0, 0, _ARCHITECTURE), (_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _NUMBER)]
    program += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _REFUSE)]
    for numbers in _DENIED.values():
        program += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _REFUSE)]
    program += [(_EQUAL, 0, 3, _SOCKET[column]), (_LOAD, 0, 0, _FIRST), (_EQUAL, 5, 0, _AF_UNIX)]  # 5: to _ALLOW
    program += [(_RETURN, 0, 0, _REFUSE), (_EQUAL, 0, 3, _SETSOCKOPT[column]), (_LOAD, 0, 0, _THIRD)]
    program += [(_EQUAL, 2, 0, _SO_SNDBUF), (_EQUAL, 1, 0, _SO_RCVBUF)]
    program += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)
