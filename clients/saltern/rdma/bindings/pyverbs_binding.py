"""pyverbs of rdma-core (Debian's ``python3-pyverbs``, 44 and later).

What it does not protect from, and where that is contained:

* Reading ``mr.lkey`` after a close is a read of freed memory: keys are taken as integers at once.
* ``SGE``, ``SendWR`` and ``RecvWR`` leak unless closed, and closing twice aborts: ``post`` makes and closes them.
* ``next_wr`` is a bare pointer: ``post`` holds the whole chain until it is posted.
* A region keeps no reference to its memory: ``saltern.rdma.region`` does.
* Before rdma-core 57 a channel does not tell its file descriptor: it is found as the process's new one.
* No call releases the GIL, so none may block: the descriptor is made non-blocking.
* One channel serves one completion queue; with two, closing one waits for ever.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any, Final

try:
    from pyverbs import enums
except ImportError:  # renamed in rdma-core 58
    import pyverbs.libibverbs_enums as enums
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

from saltern.rdma.bindings.interface import Handle, Path, RawCompletion, Registration, VerbsError
from saltern.rdma.splitting import Chain
from saltern.rdma.values import MTUS_BYTES, Access, DeviceLimits, LocalSpan

try:
    from pyverbs.mr import DmaBufMR
except ImportError:
    DmaBufMR = None

_DESCRIPTORS: Final = "/proc/self/fd"
_CHANNEL_TRIES: Final = 5
#: A request must be made with a span; one that moves nothing is told afterwards that it has none.
_NO_SPAN: Final = (LocalSpan(0, 0, 0),)
_channels: Final = threading.Lock()


def _fault(verb: str, error: Exception) -> VerbsError:
    number = getattr(error, "error_code", 0)
    # post_send reports the errno negated in some versions.
    return VerbsError(verb, abs(number) if isinstance(number, int) and number != -1 else 0)


class PyverbsBinding:
    name = "pyverbs"
    offers_dmabuf = DmaBufMR is not None

    def open_device(self, name: str) -> Handle:
        with _channels:  # a device has a descriptor of the same kind
            try:
                return Context(name=name)
            except PyverbsError as error:
                raise _fault("ibv_open_device", error) from error

    def close_device(self, device: Handle) -> None:
        with _channels:
            _close("ibv_close_device", device)

    def query_limits(self, device: Handle, port: int) -> DeviceLimits:
        try:
            facts, port_facts = device.query_device(), device.query_port(port)
        except PyverbsError as error:
            raise _fault("ibv_query_device", error) from error
        return DeviceLimits(
            max_message_bytes=port_facts.max_msg_sz,
            max_region_bytes=facts.max_mr_size,
            max_requests=facts.max_qp_wr,
            max_spans=min(facts.max_sge, facts.max_sge_rd or facts.max_sge),
            max_completions=facts.max_cqe,
            max_reads=min(facts.max_qp_rd_atom, facts.max_qp_init_rd_atom),
            active_mtu_bytes=MTUS_BYTES[int(port_facts.active_mtu) - 1],
            max_mtu_bytes=MTUS_BYTES[int(port_facts.max_mtu) - 1],
            lid=port_facts.lid,
        )

    def allocate_domain(self, device: Handle) -> Handle:
        try:
            return PD(device)
        except PyverbsError as error:
            raise _fault("ibv_alloc_pd", error) from error

    def free_domain(self, domain: Handle) -> None:
        _close("ibv_dealloc_pd", domain)

    def register(self, domain: Handle, address: int, length_bytes: int, access: Access) -> Registration:
        try:
            region = MR(domain, length_bytes, int(access), address=address)
        except PyverbsError as error:
            raise _fault("ibv_reg_mr", error) from error
        return Registration(region, int(region.lkey), int(region.rkey))

    def register_dmabuf(
        self, domain: Handle, descriptor: int, offset_bytes: int, length_bytes: int, access: Access
    ) -> Registration:
        if DmaBufMR is None:
            raise VerbsError("ibv_reg_dmabuf_mr", errno.EOPNOTSUPP)
        try:
            region = DmaBufMR(domain, length_bytes, int(access), dmabuf=descriptor, offset=offset_bytes)
        except PyverbsError as error:
            raise _fault("ibv_reg_dmabuf_mr", error) from error
        return Registration(region, int(region.lkey), int(region.rkey))

    def deregister(self, region: Handle) -> None:
        _close("ibv_dereg_mr", region)

    def create_channel(self, device: Handle) -> tuple[Handle, int]:
        # Two channels made at once could not be told apart by their descriptors.
        with _channels:
            for _ in range(_CHANNEL_TRIES):
                before = _descriptors()
                try:
                    channel = CompChannel(device)
                except PyverbsError as error:
                    raise _fault("ibv_create_comp_channel", error) from error
                descriptor = getattr(channel, "fd", None)
                if descriptor is None:
                    new = [number for number in _descriptors() - before if _is_of_events(number)]
                    if len(new) != 1:  # other threads have opened and closed descriptors meanwhile
                        channel.close()
                        continue
                    (descriptor,) = new
                os.set_blocking(descriptor, False)
                return channel, descriptor
        raise VerbsError("ibv_create_comp_channel: its file descriptor", errno.EBADF)

    def close_channel(self, channel: Handle) -> None:
        with _channels:  # its number, free again, would be taken for one that was there before
            _close("ibv_destroy_comp_channel", channel)

    def create_completions(self, device: Handle, channel: Handle, capacity: int) -> Handle:
        try:
            return CQ(device, capacity, None, channel)
        except PyverbsError as error:
            raise _fault("ibv_create_cq", error) from error

    def destroy_completions(self, completions: Handle) -> None:
        _close("ibv_destroy_cq", completions)

    def arm(self, completions: Handle) -> None:
        try:
            completions.req_notify()
        except PyverbsError as error:
            raise _fault("ibv_req_notify_cq", error) from error

    def take_event(self, channel: Handle, completions: Handle) -> bool:
        try:
            channel.get_cq_event(completions)
        except PyverbsError:
            return False  # EAGAIN: it does not say so
        completions.ack_events(1)
        return True

    def poll(self, completions: Handle, limit: int) -> list[RawCompletion]:
        try:
            _, entries = completions.poll(limit)
        except PyverbsError as error:
            raise _fault("ibv_poll_cq", error) from error
        return [_raw(entry) for entry in entries]

    def create_queue_pair(
        self, domain: Handle, completions: Handle, *, sends: int, receives: int, spans: int
    ) -> tuple[Handle, int]:
        capacity = QPCap(max_send_wr=sends, max_recv_wr=max(receives, 1), max_send_sge=spans, max_recv_sge=1)
        facts = QPInitAttr(qp_type=enums.IBV_QPT_RC, scq=completions, rcq=completions, cap=capacity, sq_sig_all=0)
        try:
            queue_pair = QP(domain, facts)
        except PyverbsError as error:
            raise _fault("ibv_create_qp", error) from error
        return queue_pair, int(queue_pair.qp_num)

    def destroy_queue_pair(self, queue_pair: Handle) -> None:
        _close("ibv_destroy_qp", queue_pair)

    def make_ready(self, queue_pair: Handle, path: Path, access: Access) -> None:
        facts = QPAttr(port_num=path.port)
        facts.qp_access_flags = int(access)
        try:
            queue_pair.to_init(facts)
            facts.path_mtu = MTUS_BYTES.index(path.mtu_bytes) + 1
            facts.dest_qp_num, facts.rq_psn, facts.sq_psn = path.peer.qpn, path.peer.psn, path.local.psn
            facts.max_rd_atomic = facts.max_dest_rd_atomic = path.reads
            facts.min_rnr_timer, facts.timeout = 12, path.ack_timeout
            facts.retry_cnt, facts.rnr_retry = path.retries, path.receiver_retries
            route = GlobalRoute(dgid=GID(path.peer.gid.exploded), sgid_index=path.gid_index, hop_limit=64)
            facts.ah_attr = AHAttr(port_num=path.port, is_global=1, gr=route, dlid=path.peer.lid)
            queue_pair.to_rts(facts)
        except PyverbsError as error:
            raise _fault("ibv_modify_qp", error) from error

    def make_error(self, queue_pair: Handle) -> None:
        facts = QPAttr()
        facts.qp_state = enums.IBV_QPS_ERR
        try:
            queue_pair.modify(facts, enums.IBV_QP_STATE)
        except PyverbsError as error:
            raise _fault("ibv_modify_qp", error) from error

    def post(self, queue_pair: Handle, chain: Chain, request_id: int) -> None:
        made: list[Any] = []
        previous = None
        try:
            for number, request in enumerate(chain, 1):
                spans = [SGE(span.address, span.length_bytes, span.local_key) for span in request.local or _NO_SPAN]
                made.extend(spans)
                flags = enums.IBV_SEND_SIGNALED if number == len(chain) else 0
                work = SendWR(
                    wr_id=request_id,
                    opcode=int(request.verb),
                    num_sge=len(spans),
                    sg=spans,
                    imm_data=socket.htonl(request.immediate),  # it passes the bytes on as they are
                    send_flags=flags,
                )
                made.append(work)
                work.num_sge = len(request.local)
                work.set_wr_rdma(request.remote_key, request.remote_address)
                if previous is None:
                    first = work
                else:
                    previous.next_wr = work
                previous = work
            queue_pair.post_send(first)
        except PyverbsError as error:
            raise _fault("ibv_post_send", error) from error
        finally:
            for each in made:
                each.close()

    def post_receives(self, queue_pair: Handle, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            span = SGE(0, 0, 0)
            work = RecvWR(wr_id=request_id, num_sge=1, sg=[span])
            work.num_sge = 0
            try:
                queue_pair.post_recv(work)
            except PyverbsError as error:
                raise _fault("ibv_post_recv", error) from error
            finally:
                work.close()
                span.close()


def _close(verb: str, handle: Any) -> None:
    try:
        handle.close()
    except PyverbsError as error:
        raise _fault(verb, error) from error


def _raw(entry: Any) -> RawCompletion:
    told = entry.wc_flags & enums.IBV_WC_WITH_IMM
    return RawCompletion(
        request_id=entry.wr_id,
        status=entry.status,
        qpn=entry.qp_num,
        opcode=entry.opcode,
        byte_count=entry.byte_len,
        immediate=socket.ntohl(entry.imm_data) if told else None,
        vendor_error=entry.vendor_err,
    )


def _descriptors() -> set[int]:
    """Those of this process, by number alone: a node has thousands, and its event loop waits meanwhile."""
    found = set(map(int, os.listdir(_DESCRIPTORS)))  # noqa: PTH208 - names are all that is wanted
    # The listing's own is closed by now, and the lowest number that is free: the one that a channel will get.
    free = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    os.close(free)
    found.discard(free)
    return found


def _is_of_events(descriptor: int) -> bool:
    try:
        return "infinibandevent" in os.readlink(f"{_DESCRIPTORS}/{descriptor}")  # noqa: PTH115 - a name of the kernel's
    except OSError:  # closed meanwhile, as the listing's own
        return False
