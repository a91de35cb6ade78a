"""The ``ibverbs`` wheel from PyPI: nothing to compile, libibverbs loaded when it is imported.

It raises on use after close, tells the channel's descriptor and releases the GIL; the seam above treats it no
differently for that.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import ibverbs

from saltern.rdma.bindings.interface import Handle, Path, RawCompletion, Registration, VerbsError
from saltern.rdma.splitting import Chain
from saltern.rdma.values import MTUS_BYTES, Access, DeviceLimits

_Mask: Final = ibverbs.QPAttrMask
_READY_TO_RECEIVE: Final = (
    _Mask.STATE
    | _Mask.AV
    | _Mask.PATH_MTU
    | _Mask.DEST_QPN
    | _Mask.RQ_PSN
    | _Mask.MAX_DEST_RD_ATOMIC
    | _Mask.MIN_RNR_TIMER
)
_READY_TO_SEND: Final = (
    _Mask.STATE | _Mask.SQ_PSN | _Mask.TIMEOUT | _Mask.RETRY_CNT | _Mask.RNR_RETRY | _Mask.MAX_QP_RD_ATOMIC
)
#: What one read of an int of the verbs may raise besides their own error: a closed or wrong object.
_FAULTS: Final = (OSError, ValueError, RuntimeError)


def _fault(verb: str, error: Exception) -> VerbsError:
    return VerbsError(verb, getattr(error, "errno", None) or 0)


class IbverbsBinding:
    name = "ibverbs"
    offers_dmabuf = hasattr(ibverbs.PD, "reg_dmabuf_mr")

    def open_device(self, name: str) -> Handle:
        try:
            found = next((device for device in ibverbs.get_device_list() if device.name == name), None)
            if found is None:
                raise FileNotFoundError(2, "no such device")
            return found.open()
        except _FAULTS as error:
            raise _fault("ibv_open_device", error) from error

    def close_device(self, device: Handle) -> None:
        _close("ibv_close_device", device)

    def query_limits(self, device: Handle, port: int) -> DeviceLimits:
        try:
            facts, port_facts = device.query_device(), device.query_port(port)
        except _FAULTS as error:
            raise _fault("ibv_query_device", error) from error
        return DeviceLimits(
            max_message_bytes=port_facts.max_msg_sz,
            max_region_bytes=facts.max_mr_size,
            max_requests=facts.max_qp_wr,
            max_spans=facts.max_sge,
            max_completions=facts.max_cqe,
            max_reads=facts.max_qp_rd_atom,
            active_mtu_bytes=MTUS_BYTES[int(port_facts.active_mtu) - 1],
            max_mtu_bytes=MTUS_BYTES[int(port_facts.max_mtu) - 1],
            lid=port_facts.lid,
        )

    def allocate_domain(self, device: Handle) -> Handle:
        try:
            return device.alloc_pd()
        except _FAULTS as error:
            raise _fault("ibv_alloc_pd", error) from error

    def free_domain(self, domain: Handle) -> None:
        _close("ibv_dealloc_pd", domain)

    def register(self, domain: Handle, address: int, length_bytes: int, access: Access) -> Registration:
        try:
            region = domain.reg_mr(address, length_bytes, int(access))
        except _FAULTS as error:
            raise _fault("ibv_reg_mr", error) from error
        return Registration(region, int(region.lkey), int(region.rkey))

    def register_dmabuf(
        self, domain: Handle, descriptor: int, offset_bytes: int, length_bytes: int, access: Access
    ) -> Registration:
        try:
            region = domain.reg_dmabuf_mr(offset_bytes, length_bytes, offset_bytes, descriptor, int(access))
        except _FAULTS as error:
            raise _fault("ibv_reg_dmabuf_mr", error) from error
        return Registration(region, int(region.lkey), int(region.rkey))

    def deregister(self, region: Handle) -> None:
        _close("ibv_dereg_mr", region)

    def create_channel(self, device: Handle) -> tuple[Handle, int]:
        try:
            channel = device.create_comp_channel()
        except _FAULTS as error:
            raise _fault("ibv_create_comp_channel", error) from error
        os.set_blocking(channel.fd, False)
        return channel, channel.fd

    def close_channel(self, channel: Handle) -> None:
        _close("ibv_destroy_comp_channel", channel)

    def create_completions(self, device: Handle, channel: Handle, capacity: int) -> Handle:
        try:
            return device.create_cq(capacity, channel)
        except _FAULTS as error:
            raise _fault("ibv_create_cq", error) from error

    def destroy_completions(self, completions: Handle) -> None:
        _close("ibv_destroy_cq", completions)

    def arm(self, completions: Handle) -> None:
        try:
            completions.req_notify()
        except _FAULTS as error:
            raise _fault("ibv_req_notify_cq", error) from error

    def take_event(self, channel: Handle, completions: Handle) -> bool:
        try:
            channel.get_cq_event()
        except BlockingIOError:
            return False
        except _FAULTS as error:
            if _fault("", error).number in (0, 11):
                return False
            raise _fault("ibv_get_cq_event", error) from error
        completions.ack_events(1)
        return True

    def poll(self, completions: Handle, limit: int) -> list[RawCompletion]:
        try:
            entries = completions.poll(limit)
        except _FAULTS as error:
            raise _fault("ibv_poll_cq", error) from error
        return [_raw(entry) for entry in entries]

    def create_queue_pair(
        self, domain: Handle, completions: Handle, *, sends: int, receives: int, spans: int
    ) -> tuple[Handle, int]:
        facts = ibverbs.QPInitAttr(
            send_cq=completions,
            recv_cq=completions,
            qp_type=ibverbs.QPType.RC,
            max_send_wr=sends,
            max_recv_wr=max(receives, 1),
            max_send_sge=spans,
            max_recv_sge=1,
        )
        try:
            queue_pair = domain.create_qp(facts)
        except _FAULTS as error:
            raise _fault("ibv_create_qp", error) from error
        return queue_pair, int(queue_pair.qp_num)

    def destroy_queue_pair(self, queue_pair: Handle) -> None:
        _close("ibv_destroy_qp", queue_pair)

    def make_ready(self, queue_pair: Handle, path: Path, access: Access) -> None:
        route = ibverbs.AHAttr(
            dgid=path.peer.gid.value,
            sgid_index=path.gid_index,
            dlid=path.peer.lid,
            is_global=1,
            port_num=path.port,
            hop_limit=64,
        )
        try:
            queue_pair.to_init(path.port, int(access))
            queue_pair.modify(
                _READY_TO_RECEIVE,
                ah_attr=route,
                qp_state=ibverbs.QPState.RTR,
                path_mtu=MTUS_BYTES.index(path.mtu_bytes) + 1,
                dest_qp_num=path.peer.qpn,
                rq_psn=path.peer.psn,
                max_dest_rd_atomic=path.reads,
                min_rnr_timer=12,
            )
            queue_pair.modify(
                _READY_TO_SEND,
                qp_state=ibverbs.QPState.RTS,
                sq_psn=path.local.psn,
                timeout=path.ack_timeout,
                retry_cnt=path.retries,
                rnr_retry=path.receiver_retries,
                max_rd_atomic=path.reads,
            )
        except _FAULTS as error:
            raise _fault("ibv_modify_qp", error) from error

    def make_error(self, queue_pair: Handle) -> None:
        try:
            queue_pair.modify(_Mask.STATE, qp_state=ibverbs.QPState.ERR)
        except _FAULTS as error:
            raise _fault("ibv_modify_qp", error) from error

    def post(self, queue_pair: Handle, chain: Chain, request_id: int) -> None:
        work = [
            ibverbs.SendWR(
                wr_id=request_id,
                sg_list=[ibverbs.SGE(span.address, span.length_bytes, span.local_key) for span in request.local],
                opcode=int(request.verb),
                send_flags=int(ibverbs.SendFlags.SIGNALED) if number == len(chain) else 0,
                remote_addr=request.remote_address,
                rkey=request.remote_key,
                imm_data=request.immediate,
            )
            for number, request in enumerate(chain, 1)
        ]
        try:
            queue_pair.post_send(work)
        except _FAULTS as error:
            raise _fault("ibv_post_send", error) from error

    def post_receives(self, queue_pair: Handle, request_ids: Sequence[int]) -> None:
        try:
            queue_pair.post_recv([ibverbs.RecvWR(wr_id=request_id, sg_list=[]) for request_id in request_ids])
        except _FAULTS as error:
            raise _fault("ibv_post_recv", error) from error


def _close(verb: str, handle: Any) -> None:
    try:
        handle.close()
    except _FAULTS as error:
        raise _fault(verb, error) from error


def _raw(entry: Any) -> RawCompletion:
    told = entry.wc_flags & ibverbs.WCFlags.WITH_IMM
    return RawCompletion(
        request_id=entry.wr_id,
        status=entry.status,
        qpn=entry.qp_num,
        opcode=entry.opcode,
        byte_count=entry.byte_len,
        immediate=entry.imm_data if told else None,
        vendor_error=entry.vendor_err,
    )
