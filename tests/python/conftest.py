"""A real `blockyard serve` on a free port, and the official client for it.

The report of a failed test has the end of the server's log.
"""

import openai
import pytest
from process import serve


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    server = serve(tmp_path_factory.mktemp("blockyard"))
    server.wait_until("/ready")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def model(client):
    return client.models.list().data[0].id


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    server = item.funcargs.get("server")
    if report.failed and server is not None:
        report.sections.append(("blockyard serve, end of its log", server.log_tail()))
    return report
