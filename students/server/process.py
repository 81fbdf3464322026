"""The process of `opd serve student`."""

from typing import TYPE_CHECKING

from opd.students.server.options import StudentOptions
from opd.teachers.server.process import run_server

if TYPE_CHECKING:
    from opd.students.server.backend import StudentBackend
    from opd.teachers.server.base import ModelServer


def serve_student(options: StudentOptions) -> None:
    """See `opd.teachers.server.process.serve_teacher`."""

    def load(token: str | None) -> tuple["ModelServer", str]:
        from opd.students.server.app import StudentServer
        from opd.teachers.server.base import Limits

        if options.backend == "vllm":
            from opd.students.vllm.model import VLLMStudent

            model: StudentBackend = VLLMStudent.load(options)
        else:
            from opd.students.server.model import ServedStudent

            model = ServedStudent.load(options)
        limits = Limits(queue_tokens=options.max_queue_tokens, body_bytes=options.max_body_mib * 2**20)
        ready = f"serving the student {model.name} at {{}} (tokens {model.tokens}); its weights come from the trainer"
        return StudentServer(model, token=token, limits=limits), ready

    run_server(options.host, options.port, options.token_file, load)
