"""Sends files and JSON values from one rank to another.

Files are sent in messages of bounded size.

    send_file(path, size, link)        on the sender
    receive_file(path, size, link)     on the receiver

If a rank cannot read or write its file, it still sends or receives all messages, because the other
rank would otherwise hang. Afterwards, the function returns the text of the error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threed.checkpoint.files import overwriting
from threed.distributed import collectives
from threed.distributed.topology import Link

MESSAGE = 2**24  # bytes per message


def send_file(path: Path, size: int, link: Link, device: torch.device | str = "cpu") -> str:
    """Sends the first `size` bytes of a file.

    Zeros are sent in place of bytes that cannot be read. A later load of the received file then
    fails, because the hash of the file is wrong.

    Args:
        path: file to send.
        size: number of bytes to send.
        link: the receiving rank and the process group.
        device: device of the message tensors; the process group must support it.

    Returns:
        An error text, or "".
    """
    problem = ""
    for at in range(0, size, MESSAGE):
        data = torch.zeros(min(MESSAGE, size - at), dtype=torch.uint8)
        try:
            with path.open("rb", buffering=0) as file:
                file.seek(at)
                if file.readinto(data.numpy().data) != data.numel():
                    raise OSError(f"{path} ends too early")
        except OSError as error:
            problem = str(error)
        _send(data, link, device)
    return problem


def receive_file(path: Path, size: int, link: Link, device: torch.device | str = "cpu") -> str:
    """Receives the bytes that `send_file` sends, and writes them to a file.

    Args:
        path: file to write; an existing file is overwritten.
        size: number of bytes to receive; the `size` of `send_file`.
        link: the sending rank and the process group.
        device: device of the message tensors; the process group must support it.

    Returns:
        An error text, or "".
    """
    problem = ""
    for at in range(0, size, MESSAGE):
        data = _receive(min(MESSAGE, size - at), link, device)
        try:
            with path.open(overwriting(path)) as file:
                file.truncate(size)
                file.seek(at)
                file.write(data.numpy().data)
        except OSError as error:
            problem = str(error)
    return problem


def send_json(value: Any, link: Link) -> None:
    """Sends a JSON value as CPU tensors, which the process group of `link` must support."""
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    _send(torch.tensor([data.numel()]), link)
    _send(data, link)


def receive_json(link: Link) -> Any:
    """Receives and returns the value that the other rank of `link` sends with `send_json`."""
    size = torch.zeros(1, dtype=torch.int64)
    collectives.receive([size], link)[0].wait()
    return json.loads(_receive(int(size), link).numpy().tobytes())


def _send(data: Tensor, link: Link, device: torch.device | str = "cpu") -> None:
    collectives.send([data.to(device)], link)[0].wait()


def _receive(count: int, link: Link, device: torch.device | str = "cpu") -> Tensor:
    data = torch.empty(count, dtype=torch.uint8, device=device)
    collectives.receive([data], link)[0].wait()
    return data.cpu()
