"""The files in `deploy`: manifests are valid and refer to what exists, and the program accepts their configurations.

Nothing is deployed: no test needs a cluster or a container runtime.
"""

import functools
import json
import pathlib
import re
import subprocess
import sys

import kubernetes_validate
import pytest
import yaml
from compose_spec import PyCompose
from process import ROOT, binary, environment

DEPLOY = ROOT / "deploy"
TOOLS = pathlib.Path(sys.executable).parent
OVERLAYS = ["embedded", "distributed", "distributed-tls", "vllm"]
# The files of each deployment, and the configuration of its Prometheus. Later files are merged into the first.
COMPOSE = [
    (["compose.yaml"], "compose"),
    (["compose.yaml", "compose.tls.yaml"], "compose-tls"),
    (["compose.vllm.yaml"], "compose-vllm"),
]
# The program refuses tiers that do not fit into the machine of the tests.
SMALL = ["--set", "tiers.g1=64MiB", "--set", "tiers.g2=64MiB", "--set", "tiers.g3=off"]
SECONDS = {"s": 1, "m": 60, "h": 3600}


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@functools.cache
def render(overlay):
    text = run(TOOLS / "kubectl", "kustomize", DEPLOY / "kubernetes" / overlay)
    return [resource for resource in yaml.safe_load_all(text) if resource]


def of_kind(overlay, *kinds):
    return [resource for resource in render(overlay) if resource["kind"] in kinds]


def names(overlay, *kinds):
    return {resource["metadata"]["name"] for resource in of_kind(overlay, *kinds)}


def workloads(overlay):
    return of_kind(overlay, "Deployment", "StatefulSet")


def pod(workload):
    return workload["spec"]["template"]["spec"]


def containers(overlay):
    return [(workload, container) for workload in workloads(overlay) for container in pod(workload)["containers"]]


def selected(overlay, labels):
    """The workloads whose pods have the labels."""
    has = lambda workload: labels.items() <= workload["spec"]["template"]["metadata"]["labels"].items()
    return [workload for workload in workloads(overlay) if has(workload)]


def matches(selector, labels):
    for expression in selector.get("matchExpressions", []):
        assert expression["operator"] == "In"
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


def ports(workload):
    ports = [port for container in pod(workload)["containers"] for port in container["ports"]]
    return {port["containerPort"] for port in ports} | {port["name"] for port in ports}


def secrets_of_the_page():
    """Keys of each secret that a command of the page creates, and those of the certificates."""
    page = (ROOT / "docs" / "deploy.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"create secret generic (\S+)(.*)", page)
    created = {name: set(re.findall(r"--from-(?:file|literal)=([\w.-]+)", options)) for name, options in commands}
    return created | {certificate["secretName"]: {"tls.crt", "tls.key", "ca.crt"} for certificate in certificates()}


def certificates():
    """The certificates that cert-manager makes."""
    text = (DEPLOY / "kubernetes" / "components" / "tls" / "cert-manager.yaml").read_text()
    return [resource["spec"] for resource in yaml.safe_load_all(text) if resource["kind"] == "Certificate"]


def covers(names, host):
    """Whether a certificate with these names is for the host. A wildcard stands for one label, before at least two."""
    label, _, rest = host.partition(".")
    return host in names or (f"*.{rest}" in names and label and "." in rest)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_resources_have_the_schemas_of_kubernetes(overlay):
    resources = render(overlay)
    assert len(resources) >= 10
    for resource in resources:
        kubernetes_validate.validate(resource, "1.37", strict=True)
        assert resource["kind"] == "Namespace" or resource["metadata"]["namespace"] == "blockyard"


def test_the_schema_check_finds_a_wrong_key():
    resource = json.loads(json.dumps(workloads("embedded")[0]))
    resource["spec"]["template"]["spec"]["containers"][0]["readOnlyRootFilesystem"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(resource, "1.37", strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_pods_refer_to_exists(overlay):
    created = secrets_of_the_page()
    config_maps = {resource["metadata"]["name"]: set(resource["data"]) for resource in of_kind(overlay, "ConfigMap")}

    def check_secret(name, keys):
        assert set(keys) <= created.get(name, set()), f"no command of docs/deploy.md creates {name} with {keys}"

    for workload in workloads(overlay):
        spec = pod(workload)
        assert spec["serviceAccountName"] in names(overlay, "ServiceAccount")
        claims = workload["spec"].get("volumeClaimTemplates", [])
        volumes = {volume["name"] for volume in spec["volumes"]} | {claim["metadata"]["name"] for claim in claims}
        for volume in spec["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in config_maps
            if "secret" in volume:
                items = [item["key"] for item in volume["secret"].get("items", [])]
                assert volume["secret"]["secretName"] in created
                check_secret(volume["secret"]["secretName"], items)
        for container in spec["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            variables = {variable["name"] for variable in container.get("env", [])}
            has_tls = "BLOCKYARD_CLUSTER__TLS__CLIENT_CA_FILE" in variables
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert container[probe]["httpGet"]["port"] in ports(workload)
                assert container[probe]["httpGet"].get("scheme", "HTTP") == ("HTTPS" if has_tls else "HTTP")
            for source in container.get("envFrom", []):
                check_secret(source["secretRef"]["name"], ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
            for source in (variable.get("valueFrom", {}) for variable in container.get("env", [])):
                if "configMapKeyRef" in source:
                    assert source["configMapKeyRef"]["key"] in config_maps[source["configMapKeyRef"]["name"]]
                if "secretKeyRef" in source and not source["secretKeyRef"].get("optional"):
                    check_secret(source["secretKeyRef"]["name"], [source["secretKeyRef"]["key"]])
        if workload["kind"] == "StatefulSet":
            assert workload["spec"]["serviceName"] in names(overlay, "Service")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_services_budgets_and_autoscalers_have_pods(overlay):
    for service in of_kind(overlay, "Service"):
        pods = selected(overlay, service["spec"]["selector"])
        assert pods, service["metadata"]["name"]
        for port, workload in ((port, workload) for port in service["spec"]["ports"] for workload in pods):
            assert port["targetPort"] in ports(workload)
    budgets = [budget["spec"]["selector"]["matchLabels"] for budget in of_kind(overlay, "PodDisruptionBudget")]
    covered = [workload["metadata"]["name"] for labels in budgets for workload in selected(overlay, labels)]
    assert sorted(covered) == sorted(names(overlay, "Deployment", "StatefulSet")), "each has one budget"
    scaled = set()
    for scaler in of_kind(overlay, "HorizontalPodAutoscaler"):
        target = scaler["spec"]["scaleTargetRef"]
        assert target["name"] in names(overlay, target["kind"])
        scaled.add(target["name"])
    for workload in workloads(overlay):
        is_scaled = workload["metadata"]["name"] in scaled
        assert ("replicas" in workload["spec"]) != is_scaled, "one of both sets the number"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_network_policies_name_pods_and_ports_that_exist(overlay):
    labels = {w["metadata"]["name"]: w["spec"]["template"]["metadata"]["labels"] for w in workloads(overlay)}
    by_name = {workload["metadata"]["name"]: workload for workload in workloads(overlay)}
    find = lambda selector: [by_name[name] for name in labels if matches(selector, labels[name])]
    covered = {"Ingress": set(), "Egress": set()}
    for policy in of_kind(overlay, "NetworkPolicy"):
        spec = policy["spec"]
        here = find(spec["podSelector"])
        assert here, policy["metadata"]["name"]
        for kind in spec["policyTypes"]:
            covered[kind] |= {workload["metadata"]["name"] for workload in here}
        for direction, peers in (("ingress", "from"), ("egress", "to")):
            for rule in spec.get(direction, []):
                assert rule[peers], "every rule says whom it allows"
                for peer in rule[peers]:
                    outside = "namespaceSelector" in peer or "ipBlock" in peer
                    there = [] if outside else find(peer["podSelector"])
                    assert outside or there, policy["metadata"]["name"]
                    targets = here if direction == "ingress" else there
                    for port, workload in ((port["port"], target) for port in rule["ports"] for target in targets):
                        assert port in ports(workload), f"{policy['metadata']['name']}: no port {port}"
    assert all(covered[kind] == set(labels) for kind in covered)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_have_the_least_rights(overlay):
    for workload, container in containers(overlay):
        context, rights = pod(workload)["securityContext"], container["securityContext"]
        assert context["runAsNonRoot"] and context["runAsUser"] > 0
        assert context["seccompProfile"]["type"] == "RuntimeDefault"
        assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert pod(workload)["automountServiceAccountToken"] is False
        # Kubernetes would set BLOCKYARD_PORT for the service `blockyard`, which is no key of the configuration.
        assert pod(workload)["enableServiceLinks"] is False
        assert {"cpu", "memory"} <= container["resources"]["requests"].keys()


def keys_file(folder):
    path = folder / "keys.toml"
    run(binary(), "key", "add", "--file", path, "test", env=environment())
    return path.read_text()


def print_config(role, text, folder, arguments, variables):
    path = folder / f"{role}.toml"
    path.write_text(text)
    command = [binary(), role, "--config", path, *arguments, *SMALL, "--print-config", "--json"]
    printed = json.loads(run(*command, env=environment() | {"HOME": str(folder)} | variables))
    flat = {}

    def flatten(prefix, tree):
        for key, value in tree.items():
            if isinstance(value, dict) and "origin" in value:
                flat[prefix + key] = value.get("value")
            elif isinstance(value, dict):
                flatten(f"{prefix}{key}.", value)

    flatten("", printed)
    return flat


def names_of_secret(secret):
    [names] = [certificate["dnsNames"] for certificate in certificates() if certificate["secretName"] == secret]
    return names


def certificate_files(folder, hosts):
    """The files of a secret as cert-manager makes it, with an authority of its own."""
    authority = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "9"]
    run("openssl", "req", *authority, "-subj", "/CN=ca", "-keyout", folder / "ca.key", "-out", folder / "ca.crt")
    names = "subjectAltName=" + ",".join(f"DNS:{host}" for host in hosts)
    signed = ["-CA", folder / "ca.crt", "-CAkey", folder / "ca.key", "-addext", "basicConstraints=critical,CA:FALSE"]
    files = ["-keyout", folder / "tls.key", "-out", folder / "tls.crt"]
    run("openssl", "req", *authority, "-subj", "/CN=here", *signed, "-addext", names, *files)


def seconds(duration):
    count, unit = re.fullmatch(r"(\d+)([smh])", duration).groups()
    return int(count) * SECONDS[unit]


def check_drain_limit(role, values, grace_period):
    """The longest request ends before four fifths of `shutdown_timeout`, and all of that before the grace period."""
    timeout = seconds(values["shutdown_timeout"])
    assert timeout < grace_period
    # Streams of workers are continued on other workers.
    if role != "worker":
        longest = seconds(values["frontend.max_request_time"]) + seconds(values["frontend.shutdown_delay"])
        assert longest <= timeout * 4 / 5


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_program_accepts_the_configuration_of_each_pod(overlay, tmp_path):
    config_maps = {resource["metadata"]["name"]: resource["data"] for resource in of_kind(overlay, "ConfigMap")}
    ours = [(workload, container) for workload, container in containers(overlay) if "args" in container]
    ours = [(workload, container) for workload, container in ours if "blockyard" in container["image"]]
    assert ours
    for workload, container in ours:
        folder = tmp_path / workload["metadata"]["name"]
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        here = lambda path, folder=folder: folder / path.removeprefix("/")
        for volume in pod(workload)["volumes"]:
            target = here(mounts[volume["name"]])
            target.mkdir(parents=True)
            if "configMap" in volume:
                for name, text in config_maps[volume["configMap"]["name"]].items():
                    (target / name).write_text(text)
            elif volume["secret"]["secretName"] == "blockyard-api-keys":
                keys_file(target)
            elif volume["secret"]["secretName"].endswith("-tls"):
                certificate_files(target, ["localhost"])
            else:
                items = volume["secret"].get("items") or [{"path": "secret"}]
                for item in items:
                    (target / item["path"]).write_text("0123456789abcdef" * 2)
        fields = {"metadata.name": f"{workload['metadata']['name']}-0", "metadata.namespace": "blockyard"}
        variables = {}
        for variable in container.get("env", []):
            field = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            if label := re.fullmatch(r"metadata\.labels\['(.*)'\]", field):
                variables[variable["name"]] = workload["spec"]["template"]["metadata"]["labels"][label[1]]
            elif field in fields:
                variables[variable["name"]] = fields[field]
            elif "value" in variable:
                # A variable that is defined later would not be expanded.
                expand = lambda match, known=variables: known[match[1]]
                variables[variable["name"]] = re.sub(r"\$\((\w+)\)", expand, variable["value"])
        arguments = [re.sub(r"\$\((\w+)\)", lambda match: variables[match[1]], text) for text in container["args"]]
        role, flag, path, *rest = arguments
        assert flag == "--config"
        text = here(path).read_text().replace('"/', f'"{folder}/')
        variables = {name: value for name, value in variables.items() if name.startswith("BLOCKYARD_")}
        variables = {name: re.sub(r"^/", f"{folder}/", value) for name, value in variables.items()}
        values = print_config(role, text, folder, rest, variables)

        check_drain_limit(role, values, pod(workload)["terminationGracePeriodSeconds"])
        listens = values["cluster.listen" if role == "worker" else "listen"]
        assert listens.startswith("0.0.0.0:") and int(listens.rsplit(":")[-1]) in ports(workload)
        assert values["router.planner.mode"] != "apply", "the autoscaler sets the number of each role"
        if role != "frontend" and not values["upstreams"]:
            assert values["data_dir"] == f"{folder}{mounts['data']}", "it is on a volume"
        if role == "worker":
            form = r"(https?)://(([\w-]+)\.([\w-]+)(\.blockyard\.svc)?):8100"
            url = re.fullmatch(form, values["cluster.advertise"])
            assert url[3] == f"{workload['metadata']['name']}-0" and url[4] == workload["spec"]["serviceName"]
            assert (url[1] == "https") == (overlay == "distributed-tls")
            assert url[1] == "http" or covers(names_of_secret("blockyard-worker-tls"), url[2])
            assert values["workers"] == workload["spec"]["template"]["metadata"]["labels"]["blockyard/role"] + ":1"
        for server in values["nats.servers"] if overlay.startswith("distributed") else []:
            url = re.fullmatch(r"(nats|tls)://(nats-(\d)\.nats):4222", server)
            [nats] = selected(overlay, {"app.kubernetes.io/component": "nats"})
            assert int(url[3]) < nats["spec"]["replicas"]
            assert (url[1] == "tls") == (overlay == "distributed-tls") == bool(values.get("nats.ca_file"))
            assert url[1] == "nats" or covers(names_of_secret("blockyard-nats-tls"), url[2])
        if overlay == "distributed-tls":
            keys = ["cert_file", "key_file", "ca_file"] + (["client_ca_file"] if role == "worker" else [])
            found = {key: values.get(f"cluster.tls.{key}") for key in keys}
            assert all(path and pathlib.Path(path).exists() for path in found.values()), found
        for upstream in values["upstreams"]:
            assert re.fullmatch(r"http://([\w-]+):8000/?", upstream["url"])[1] in names(overlay, "Service")


def test_nats_accepts_its_configuration(tmp_path):
    text = (DEPLOY / "kubernetes" / "distributed" / "nats" / "nats.conf").read_text()
    (tmp_path / "nats.conf").write_text(text.replace('"/data"', f'"{tmp_path}"'))
    variables = {"SERVER_NAME": "nats-0", "FRONTEND_PASSWORD": "x1", "WORKER_PASSWORD": "x2"}
    run(TOOLS / "nats-server", "-t", "-c", tmp_path / "nats.conf", env=environment() | variables)
    permissions = re.compile(r"permissions \{.*?\n      \}", re.DOTALL)
    assert permissions.findall(text) == permissions.findall((ROOT / "docs" / "nats.md").read_text())


def test_nats_accepts_its_configuration_with_tls(tmp_path):
    """As its pod has it: one folder with both files, which refer to the folder of the certificate."""
    certificate_files(tmp_path, names_of_secret("blockyard-nats-tls"))
    config_maps = [resource["data"] for resource in of_kind("distributed-tls", "ConfigMap")]
    [config] = [data for data in config_maps if "tls.conf" in data]
    for name, text in config.items():
        (tmp_path / name).write_text(text.replace('"/data"', f'"{tmp_path}"').replace("/etc/nats-tls", str(tmp_path)))
    variables = {"SERVER_NAME": "nats-0", "FRONTEND_PASSWORD": "x1", "WORKER_PASSWORD": "x2"}
    check = [TOOLS / "nats-server", "-t", "-c", tmp_path / "tls.conf"]
    run(*check, env=environment() | variables)
    plain, tls = (config[name] for name in ("nats.conf", "tls.conf"))
    routes = re.compile(r"name: blockyard\n  port: 6222\n  routes: \[.*\]")
    assert routes.findall(plain) == routes.findall(tls) != []
    (tmp_path / "tls.crt").unlink()
    with pytest.raises(AssertionError, match="tls.crt"):
        run(*check, env=environment() | variables)


def test_certificates_are_for_their_names_and_uses():
    usages = {certificate["secretName"]: certificate.get("usages") for certificate in certificates()}
    both = ["server auth", "client auth"]
    expected = {"blockyard-frontend-tls": ["client auth"], "blockyard-worker-tls": both, "blockyard-nats-tls": both}
    assert usages == expected | {"blockyard-ca": None}
    volumes = [volume for workload in workloads("distributed-tls") for volume in pod(workload)["volumes"]]
    mounted = {volume["secret"]["secretName"] for volume in volumes if "secret" in volume}
    assert {name for name in mounted if name.endswith("-tls")} == set(expected)
    assert covers(["*.a.b.svc"], "x.a.b.svc") and not covers(["*.a"], "x.a") and not covers(["*.b.svc"], "x.a.b.svc")


def merged(files):
    """As `docker compose` merges files: keys of later ones win, environments are merged and volumes added."""
    first, *later = [yaml.safe_load((DEPLOY / name).read_text()) for name in files]
    PyCompose.from_json(json.dumps(first))
    for other in later:
        PyCompose.from_json(json.dumps(other))
        assert {key for key in other if not key.startswith("x-")} == {"services"}
        for name, service in other["services"].items():
            before = first["services"][name]
            assert service.keys() <= {"command", "environment", "volumes"}, "what the lines below merge"
            before["environment"] = before.get("environment", {}) | service.get("environment", {})
            before["volumes"] = before.get("volumes", []) + service.get("volumes", [])
            before["command"] = service.get("command", before.get("command"))
    return first


@pytest.mark.parametrize("files, prometheus", COMPOSE, ids=lambda part: part if isinstance(part, str) else "")
def test_compose_files_have_the_schema_and_refer_to_what_exists(files, prometheus, tmp_path):
    compose = merged(files)
    services = compose["services"]
    has_tls = "compose.tls.yaml" in files
    targets = (DEPLOY / "prometheus" / f"{prometheus}.yaml").read_text()
    assert ("scheme: https" in targets) == has_tls
    assert f"/etc/prometheus/{prometheus}.yaml" in services["prometheus"]["command"][0]
    if has_tls:
        certificate_files(tmp_path, ["localhost"])
    assert set(re.findall(r'"([\w-]+):\d+"', targets)) <= services.keys()
    # podman-compose ignores them, without a warning: files are mounted as volumes.
    assert "configs" not in compose and not any("configs" in service for service in services.values())
    # podman-compose resolves the paths of an extended service from another folder, so no service is.
    assert services["grafana"] == merged(["compose.yaml"])["services"]["grafana"]
    for service in services.values():
        assert set(service.get("depends_on", [])) <= services.keys()
        for source in (volume.split(":")[0] for volume in service.get("volumes", [])):
            is_made = source.startswith("./secrets/")  # by the commands of docs/deploy.md
            assert is_made or ((DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"])
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "only this host reaches it"
        if service["image"] != "blockyard":
            continue
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        (tmp_path / "cluster").write_text("0123456789abcdef" * 2)
        role, flag, path, *rest = service["command"]
        mounts = [volume.split(":") for volume in service["volumes"]]
        [config] = [source for source, target, *_ in mounts if target == path]
        assert flag == "--config"
        text = (DEPLOY / config).read_text()
        text = text.replace("/run/secrets/cluster", str(tmp_path / "cluster")).replace("/var/lib", str(tmp_path))
        settings = {key: value for key, value in service.get("environment", {}).items() if key.startswith("BLOCKYARD_")}
        settings = {key: value.replace("/etc/blockyard/tls", str(tmp_path)) for key, value in settings.items()}
        values = print_config(role, text, tmp_path, rest, settings)
        keys = ["cert_file", "key_file", "ca_file"] + (["client_ca_file"] if role == "worker" else [])
        found = [values.get(f"cluster.tls.{key}") for key in keys] if role != "serve" else []
        assert all(found) if has_tls else not any(found), found
        assert (values["cluster.advertise"] or "").startswith("https:") == (has_tls and role == "worker")
        assert any(server.startswith("tls:") for server in values["nats.servers"]) == has_tls
        check_drain_limit(role, values, seconds(service["stop_grace_period"]))
        hosts = values["nats.servers"] if role != "serve" else [upstream["url"] for upstream in values["upstreams"]]
        hosts = [*hosts, *filter(None, [values["tiers.g4.endpoint"], values["cluster.advertise"]])]
        assert {re.match(r"\w+://([\w-]+):", host)[1] for host in hosts} <= services.keys()


def test_the_metric_of_the_autoscalers_is_that_of_the_adapter():
    adapter = yaml.safe_load((DEPLOY / "kubernetes" / "prometheus-adapter.yaml").read_text())
    [rule] = adapter["rules"]["external"]
    metric = rule["seriesQuery"].split("{")[0]
    assert f"| `{metric}` | gauge | `model`, `role` |" in (ROOT / "docs" / "metrics.md").read_text()
    scalers = of_kind("distributed", "HorizontalPodAutoscaler")
    asked = [ask["external"]["metric"] for s in scalers for ask in s["spec"]["metrics"] if ask["type"] == "External"]
    asked = [(ask["name"], ask["selector"]["matchLabels"]["role"]) for ask in asked]
    assert asked == [(metric, "decode"), (metric, "prefill")]


def promtool():
    """The one that `make test` unpacks from Debian's package, or that of the machine."""
    found = ROOT / ".prometheus" / "usr" / "bin" / "promtool"
    if not found.exists():
        pytest.skip("there is no promtool: make test unpacks it where apt-get and dpkg are")
    return found


def test_prometheus_accepts_the_rules_and_the_alerts_fire():
    folder = DEPLOY / "prometheus"
    run(promtool(), "check", "rules", folder / "alerts.yaml", folder / "rules.yaml")
    run(promtool(), "test", "rules", folder / "tests.yaml")


def test_every_alert_is_seen_to_fire():
    folder = DEPLOY / "prometheus"
    groups = yaml.safe_load((folder / "alerts.yaml").read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"]}
    cases = yaml.safe_load((folder / "tests.yaml").read_text())["tests"]
    expected = [test for case in cases for test in case.get("alert_rule_test", []) if test.get("exp_alerts")]
    assert {test["alertname"] for test in expected} == alerts


@pytest.mark.parametrize("name", ["compose", "compose-tls", "compose-vllm", "kubernetes"])
def test_prometheus_accepts_the_configuration(name, tmp_path):
    text = (DEPLOY / "prometheus" / f"{name}.yaml").read_text()
    # Debian builds Prometheus without the discovery of Kubernetes.
    text = text.replace("kubernetes_sd_configs: [{ role: pod }]", "static_configs: []")
    certificate_files(tmp_path, ["localhost"])
    (tmp_path / "prometheus.yaml").write_text(text.replace("/etc/blockyard/tls", str(tmp_path)))
    for rules in ("alerts.yaml", "rules.yaml"):
        (tmp_path / rules).write_text((DEPLOY / "prometheus" / rules).read_text())
    run(promtool(), "check", "config", tmp_path / "prometheus.yaml")


def test_the_image_gets_every_crate():
    let_through = (ROOT / ".dockerignore").read_text().split()
    members = re.search(r"^members = \[(.*)\]$", (ROOT / "Cargo.toml").read_text(), re.MULTILINE)[1]
    crates = re.findall(r'"(\w+)"', members)
    assert len(crates) >= 8 and {f"!{crate}" for crate in [*crates, "src"]} <= set(let_through)


def test_the_dockerfile_has_no_findings():
    run(TOOLS / "hadolint", DEPLOY / "Dockerfile")
