//! `blockyard doctor` for the native engine: ports, folders, memory, a process that runs beside it, and reasons not to
//! start.

use crate::process::{Process, doctor};
use std::ffi::OsStr;
use std::net::TcpListener;

#[tokio::test]
async fn the_folder_of_a_running_process_is_a_problem_at_another_port() {
    let data = tempfile::tempdir().unwrap();
    let key = OsStr::new("a-key-of-the-test");
    let process = Process::start(data.path(), &["--set", "tiers.g3=64MiB"], &[("BLOCKYARD_API_KEY", key)]).await;
    let listen = process.client.url.trim_start_matches("http://").to_owned();
    let check = async |listen: &str| {
        let data = data.path().to_str().unwrap();
        let mut command =
            doctor(&["--model", "tiny", "--data-dir", data, "--listen", listen, "--set", "tiers.g3=64MiB"]);
        let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        (output.status.code(), String::from_utf8(output.stdout).unwrap())
    };
    let owner = format!("belongs to process {}", process.id());
    let (status, beside) = check(&listen).await;
    assert!(beside.contains("is in use by a running Blockyard\n"), "{beside}");
    assert!(status == Some(0) && beside.contains("ok       disk_owner") && beside.contains(&owner), "{beside}");
    let (status, elsewhere) = check("127.0.0.1:0").await;
    assert!(elsewhere.contains("problem  disk_owner") && elsewhere.contains(&owner), "{elsewhere}");
    assert_eq!(status, Some(1));
}

#[tokio::test]
async fn the_ports_of_the_running_process_are_no_problem() {
    let data = tempfile::tempdir().unwrap();
    let settings = ["--set", "admin.listen=127.0.0.1:0", "--set", "tiers.g3=64MiB"];
    let process = Process::start(data.path(), &settings, &[]).await;
    let listen = process.client.url.trim_start_matches("http://").to_owned();
    let admin = process.client.admin.clone().unwrap().replace("http://", "admin.listen=");
    let data = data.path().to_str().unwrap();
    let flags =
        ["--model", "tiny", "--data-dir", data, "--listen", &listen, "--set", "tiers.g3=64MiB", "--set", &admin];
    let mut command = doctor(&flags);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    for check in ["port", "admin_port"] {
        let line = text.lines().find(|line| line.trim_start().starts_with(&format!("ok       {check} ")));
        assert!(line.is_some_and(|line| line.contains("is in use by a running Blockyard")), "{check}: {text}");
    }
    assert_eq!(output.status.code(), Some(0), "{text}");
}

#[test]
fn a_folder_of_the_kernel_and_a_missing_model_have_a_fix_of_their_own() {
    let data = tempfile::tempdir().unwrap();
    let output = |arguments: &[&str]| {
        let at = ["--data-dir", data.path().to_str().unwrap(), "--listen", "127.0.0.1:0"];
        let output = doctor(&[&at[..], arguments].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stdout).unwrap()
    };
    let kernel = output(&["--model", "tiny", "--g4", "/proc/g4"]);
    assert!(kernel.contains("problem  object_store"), "{kernel}");
    assert!(kernel.contains("/proc/g4: /proc is a view of the kernel"), "{kernel}");
    let model = output(&["--model", "./no-such-model"]);
    assert!(model.contains("fix: correct --model (model = \"./no-such-model\")"), "{model}");
}

#[test]
fn each_reason_not_to_start_has_a_fix_of_its_own() {
    let data = tempfile::tempdir().unwrap();
    let (data_dir, file) = (data.path().to_str().unwrap(), data.path().join("file"));
    std::fs::write(&file, "short").unwrap();
    let file = file.to_str().unwrap();
    let keys = format!("tiers.encryption={{keys={{file=\"{data_dir}/no-keys\"}}}}");
    let (certificate, key) = (format!("frontend.tls_cert_file={file}"), format!("frontend.tls_key_file={file}"));
    let missing = format!("frontend.tls_cert_file={data_dir}/no.crt");
    let (api_keys, secret) = (format!("frontend.api_keys_file={file}"), format!("frontend.tenant_secret_file={file}"));
    let cases: [(&[&str], &str); 14] = [
        (&["--g4", "az://container/prefix"], "fix: set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY"),
        (&["--set", "tiers.g1=900TiB"], "fix: use fewer workers (--workers both:1), smaller tiers (--set tiers.g1="),
        (&["--set", "tiers.g1=1B"], "fix: set at least one block, --set tiers.g1="),
        (&["--set", "tiers.g3=100B"], "fix: set at least "),
        (&["--set", &missing, "--set", &key], "fix: create the file "),
        (&["--set", &certificate, "--set", &key], "fix: write what is expected to "),
        (&["--set", &certificate], "fix: set both, --set frontend.tls_cert_file=FILE --set frontend.tls_key_file=FILE"),
        (&["--set", "frontend.api_keys_file=no/such/file"], "fix: create it with the first key: blockyard key add"),
        (&["--set", &api_keys], "fix: correct or remove line 1 of "),
        (&["--set", &secret], "fix: write a longer secret"),
        (&["--set", &keys], "--set tiers.encryption.keys.file=FILE"),
        (&["--set", "router.trace_file=no/such/folder/run.jsonl"], "fix: create the folder no/such/folder"),
        (&["--data-dir", "/proc/blockyard"], "fix: name a folder on a disk: --data-dir DIR"),
        (&["--set", "tiers.g2=lots"], "fix: correct tiers.g2 on the command line (--set tiers.g2=lots)"),
    ];
    for (arguments, fix) in cases {
        let common = ["--model", "tiny", "--data-dir", data_dir, "--listen", "127.0.0.1:0"];
        let mut command = doctor(&[&common[..], arguments].concat());
        for variable in ["AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"] {
            command.env_remove(variable);
        }
        let text = String::from_utf8(command.output().unwrap().stdout).unwrap();
        assert!(text.contains("problem  configuration") && text.contains(fix), "{arguments:?}: {text}");
        assert_eq!(text.matches("problem  configuration").count(), 1, "{arguments:?}: {text}");
    }
}

#[tokio::test]
async fn the_native_engine_has_its_memory_and_folders_checked() {
    let data = tempfile::tempdir().unwrap();
    let data_dir = data.path().to_str().unwrap();
    let g4 = data.path().join("g4");
    std::fs::create_dir(&g4).unwrap();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap().to_string();
    let arguments = ["--model", "tiny", "--data-dir", data_dir, "--listen", &listen, "--g4", g4.to_str().unwrap()];
    let output = doctor(&arguments).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    for line in ["problem  port", "ok       model", "ok       memory", "ok       disk", "ok       object_store"] {
        assert!(text.contains(line), "{line}: {text}");
    }
    assert!(text.contains("stop it, or listen elsewhere: --set listen="), "{text}");
    let small = [&arguments[..], &["--set", "tiers.g1=16MiB"]].concat();
    let text = String::from_utf8(doctor(&small).output().unwrap().stdout).unwrap();
    let (short, fix) = ("tiers.g1 = 16MiB holds 8192 of the 16384 tokens", "fix: set tiers.g1 to at least 32MiB");
    assert!(text.contains("warning  memory") && text.contains(short) && text.contains(fix), "{text}");
    assert_eq!(data.path().read_dir().unwrap().count(), 1, "nothing is created");
}
