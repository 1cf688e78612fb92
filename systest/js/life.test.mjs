// Create, connect, list, time limits, end.
import assert from 'node:assert/strict'
import { randomUUID } from 'node:crypto'
import { test } from 'node:test'
import { AuthenticationError, Sandbox, SandboxNotFoundError } from 'e2b'
import { eventually, own } from './support.mjs'

const GONE = 'inosuchsandbox0000000'

async function listed(options) {
  const paginator = Sandbox.list(options)
  const found = []
  while (paginator.hasNext) found.push(...(await paginator.nextItems()))
  return found
}

test('create, info and kill', async (t) => {
  const sandbox = await own(t, { timeoutMs: 120_000, metadata: { who: 'me' }, envs: { FOO: 'bar' } })
  assert.match(sandbox.sandboxId, /^[a-z0-9]+$/)
  const info = await sandbox.getInfo()
  assert.equal(info.sandboxId, sandbox.sandboxId)
  assert.equal(info.name, 'base')
  assert.deepEqual(info.metadata, { who: 'me' })
  assert.equal(info.state, 'running')
  assert.ok(info.cpuCount >= 1 && info.memoryMB >= 128)
  const lifetime = info.endAt - info.startedAt
  assert.ok(lifetime > 115_000 && lifetime <= 120_500, `${lifetime}`)
  assert.equal((await sandbox.commands.run('echo $FOO')).stdout, 'bar\n')
  assert.equal(await sandbox.isRunning(), true)
  assert.equal(await sandbox.kill(), true)
  assert.equal(await sandbox.isRunning(), false)
  assert.equal(await sandbox.kill(), false)
  await assert.rejects(Sandbox.getInfo(sandbox.sandboxId), SandboxNotFoundError)
})

test('connect and time limits', async (t) => {
  const sandbox = await own(t, { timeoutMs: 300_000 })
  await sandbox.files.write('/tmp/mark', 'here')
  const before = (await sandbox.getInfo()).endAt
  const other = await Sandbox.connect(sandbox.sandboxId, { timeoutMs: 10_000 })
  assert.equal(await other.files.read('/tmp/mark'), 'here')
  assert.deepEqual((await sandbox.getInfo()).endAt, before)
  await sandbox.setTimeout(60_000)
  assert.ok((await sandbox.getInfo()).endAt < before)
  await Sandbox.setTimeout(sandbox.sandboxId, 900_000)
  assert.ok((await sandbox.getInfo()).endAt > before)
  await sandbox.setTimeout(0)
  await eventually(async () => !(await sandbox.isRunning()), 5000)
})

test('a time limit ends the sandbox', async (t) => {
  const sandbox = await own(t, { timeoutMs: 2000 })
  assert.equal(await sandbox.isRunning(), true)
  await eventually(async () => !(await sandbox.isRunning()), 5000)
  await assert.rejects(sandbox.commands.run('true'), (error) => /not running|not found/i.test(error.message))
})

test('list: filters, order, pages', async (t) => {
  const mark = randomUUID()
  const odd = { mark, 'with space': 'a b=c&d é/%' }
  const ids = []
  for (const n of [0, 1, 2]) ids.push((await own(t, { metadata: { ...odd, n: `${n}` } })).sandboxId)
  const newest = ids.toReversed()
  const found = async (options) => (await listed(options)).map((s) => s.sandboxId)
  assert.deepEqual(await found({ query: { metadata: odd } }), newest)
  assert.deepEqual(await found({ query: { metadata: { mark } }, order: 'asc' }), ids)
  assert.deepEqual(await found({ query: { metadata: { mark, n: '1' } } }), [ids[1]])
  assert.deepEqual(await found({ query: { metadata: { mark, n: '7' } } }), [])
  assert.deepEqual(await found({ query: { metadata: { mark }, state: ['paused'] } }), [])
  assert.equal((await found({ query: { metadata: { mark }, state: ['running', 'paused'] } })).length, 3)
  assert.deepEqual(await found({ query: { metadata: { mark }, template: 'no-such-template' } }), [])
  const paginator = Sandbox.list({ query: { metadata: { mark } }, limit: 1 })
  const pages = []
  while (paginator.hasNext) {
    const page = await paginator.nextItems()
    assert.equal(page.length, 1)
    pages.push(page[0].sandboxId)
  }
  assert.deepEqual(pages, newest)
})

test('errors have the right types', async () => {
  const apiKey = `e2b_${'0'.repeat(40)}`
  await assert.rejects(Sandbox.create({ apiKey }), AuthenticationError)
  await assert.rejects(Sandbox.connect(GONE), SandboxNotFoundError)
  await assert.rejects(Sandbox.setTimeout(GONE, 1000), SandboxNotFoundError)
  assert.equal(await Sandbox.kill(GONE), false)
  await assert.rejects(Sandbox.create('no-such-template'), /no-such-template/)
})

test('metrics', async (t) => {
  const sandbox = await own(t)
  const [sample] = await eventually(async () => {
    const samples = await sandbox.getMetrics()
    return samples.length > 0 && samples
  }, 30_000)
  assert.ok(sample.memUsed > 0 && sample.memUsed < sample.memTotal)
  assert.ok(sample.diskUsed > 0 && sample.diskUsed < sample.diskTotal)
  assert.ok(Math.abs(sample.timestamp - Date.now()) < 60_000)
})
