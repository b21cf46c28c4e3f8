"""CPU offloading where the platform has no worker that copies: every copy is
reported as done at once. Lookup, eviction, events and counts are vLLM's own;
values that are read back are not what was written, which a random model does
not mind.
"""
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class InstantWorker(OffloadingWorker):
    def __init__(self):
        self.done = []

    def submit_store(self, job_id, src_spec, dst_spec):
        self.done.append(TransferResult(job_id=job_id, success=True))
        return True

    submit_load = submit_store

    def get_finished(self):
        done, self.done = self.done, []
        return done

    def wait(self, job_ids):
        pass


class InstantOffloadingSpec(CPUOffloadingSpec):
    def get_worker(self, kv_caches):
        return InstantWorker()
