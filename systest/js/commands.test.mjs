// Commands and terminals.
import assert from 'node:assert/strict'
import { test } from 'node:test'
import { CommandExitError, NotFoundError, TimeoutError } from 'e2b'
import { eventually, shared, sleep } from './support.mjs'

const it = shared()

test('run', async () => {
  const out = []
  const result = await it.sandbox.commands.run('echo out; echo err >&2', { onStdout: (text) => out.push(text) })
  assert.equal(result.stdout, 'out\n')
  assert.equal(result.stderr, 'err\n')
  assert.equal(result.exitCode, 0)
  assert.deepEqual(out, ['out\n'])
})

test('exit codes are errors', async () => {
  await assert.rejects(it.sandbox.commands.run('printf abc; exit 7'), (error) => {
    assert.ok(error instanceof CommandExitError)
    assert.equal(error.exitCode, 7)
    assert.equal(error.stdout, 'abc')
    assert.equal(error.stderr, '')
    return true
  })
  const missing = it.sandbox.commands.run('no_such_tool')
  await assert.rejects(missing, (error) => error.exitCode === 127)
})

test('user, directory and environment', async () => {
  const run = async (command, options) => (await it.sandbox.commands.run(command, options)).stdout
  assert.equal(await run('whoami; pwd'), 'user\n/home/user\n')
  assert.equal(await run('whoami; pwd', { user: 'root' }), 'root\n/root\n')
  assert.equal(await run('pwd', { cwd: '/tmp' }), '/tmp\n')
  assert.equal(await run('echo "$FOO"', { envs: { FOO: 'b "\'$ ü' } }), 'b "\'$ ü\n')
})

test('background, list, connect, kill', async () => {
  const handle = await it.sandbox.commands.run('sleep 0.7; echo late; sleep 60', { background: true })
  assert.ok((await it.sandbox.commands.list()).some((p) => p.pid === handle.pid))
  await handle.disconnect()
  let seen = ''
  const other = await it.sandbox.commands.connect(handle.pid, { onStdout: (text) => (seen += text) })
  await eventually(() => seen === 'late\n')
  assert.equal(await other.kill(), true)
  await assert.rejects(other.wait(), (error) => error instanceof CommandExitError && error.exitCode === -1)
  assert.equal(await it.sandbox.commands.kill(handle.pid), false)
  assert.ok(!(await it.sandbox.commands.list()).some((p) => p.pid === handle.pid))
  await assert.rejects(it.sandbox.commands.connect(999999), NotFoundError)
})

test('input', async () => {
  const handle = await it.sandbox.commands.run('cat; echo end', { background: true, stdin: true })
  await handle.sendStdin('one\n')
  await it.sandbox.commands.sendStdin(handle.pid, new TextEncoder().encode('twö\n'))
  await it.sandbox.commands.closeStdin(handle.pid)
  assert.equal((await handle.wait()).stdout, 'one\ntwö\nend\n')
  assert.equal((await it.sandbox.commands.run('cat; echo done')).stdout, 'done\n')
})

test('a time limit is typed and kills', async () => {
  const started = Date.now()
  await assert.rejects(it.sandbox.commands.run('sleep 44.5', { timeoutMs: 1000 }), TimeoutError)
  assert.ok(Date.now() - started < 3000)
  await eventually(async () => (await it.sandbox.commands.run("pgrep -fx 'sleep 44.5' || echo none")).stdout === 'none\n')
})

test('text that is split and bytes that are no text', async () => {
  const split = await it.sandbox.commands.run("printf '%8191s' | tr ' ' a; printf '\\xe2'; sleep 0.2; printf '\\x82\\xac'")
  assert.equal(split.stdout, `${'a'.repeat(8191)}€`)
  const bytes = await it.sandbox.commands.run("printf '\\xff\\xfe\\x00end'")
  assert.equal(bytes.stdout, '\ufffd\ufffd\u0000end')
})

test('output is complete', async () => {
  let got = 0
  await it.sandbox.commands.run('yes 0123456789 | head -c 5000000', { onStdout: (text) => { got += text.length } })
  assert.equal(got, 5_000_000)
})

test('many at once', async () => {
  const all = await Promise.all([...Array(12).keys()].map((n) => it.sandbox.commands.run(`echo ${n}`)))
  assert.deepEqual(all.map((r) => r.stdout), [...Array(12).keys()].map((n) => `${n}\n`))
})

test('a terminal', async () => {
  const decoder = new TextDecoder()
  let seen = ''
  const terminal = await it.sandbox.pty.create({
    cols: 80,
    rows: 24,
    envs: { FOO: 'bar' },
    onData: (data) => { seen += decoder.decode(data, { stream: true }) },
  })
  const type = (text) => it.sandbox.pty.sendInput(terminal.pid, new TextEncoder().encode(text))
  await type('echo =$FOO=$(tput cols)=\n')
  await eventually(() => seen.includes('=bar=80='))
  await it.sandbox.pty.resize(terminal.pid, { cols: 100, rows: 30 })
  await type('echo size:$(stty size):\n')
  await eventually(() => seen.includes('size:30 100:'))
  await type('exit 5\n')
  await assert.rejects(terminal.wait(), (error) => error.exitCode === 5)

  const second = await it.sandbox.pty.create({ cols: 80, rows: 24, onData: () => {} })
  const ended = second.wait().catch((error) => error)
  assert.equal(await it.sandbox.pty.kill(second.pid), true)
  assert.ok((await ended) instanceof CommandExitError)
  assert.equal(await it.sandbox.pty.kill(second.pid), false)
  await sleep(0)
})
