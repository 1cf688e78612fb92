// Files, watched directories, signed URLs.
import assert from 'node:assert/strict'
import { createHash, randomBytes } from 'node:crypto'
import { test } from 'node:test'
import { FileNotFoundError, FilesystemEventType, FileType, InvalidArgumentError } from 'e2b'
import { eventually, place, shared } from './support.mjs'

const it = shared()
const bytes = Uint8Array.from({ length: 2560 }, (_, n) => n % 256)

// The SDK adds the key even when there is none.
const written = (name, path) => ({ name, path, type: 'file', metadata: undefined })

async function collected(stream) {
  const pieces = []
  for await (const piece of stream) pieces.push(piece)
  return Buffer.concat(pieces)
}

test('every form of writing and reading', async () => {
  const { files } = it.sandbox
  const dir = await place(it.sandbox)
  const text = 'ünï €\n'
  assert.deepEqual(await files.write(`${dir}/t`, text), written('t', `${dir}/t`))
  assert.equal(await files.read(`${dir}/t`), text)
  const forms = {
    buffer: bytes.buffer,
    blob: new Blob([bytes]),
    stream: new ReadableStream({ start(c) { c.enqueue(bytes.slice(0, 1000)); c.enqueue(bytes.slice(1000)); c.close() } }),
  }
  for (const [name, data] of Object.entries(forms)) {
    await files.write(`${dir}/${name}`, data)
    assert.deepEqual(Buffer.from(await files.read(`${dir}/${name}`, { format: 'bytes' })), Buffer.from(bytes), name)
  }
  const blob = await files.read(`${dir}/blob`, { format: 'blob' })
  assert.deepEqual(Buffer.from(await blob.arrayBuffer()), Buffer.from(bytes))
  assert.deepEqual(await collected(await files.read(`${dir}/blob`, { format: 'stream' })), Buffer.from(bytes))
  await files.write(`${dir}/gz`, 'x'.repeat(50_000), { gzip: true })
  assert.equal((await files.getInfo(`${dir}/gz`)).size, 50_000)
  assert.equal(await files.read(`${dir}/gz`, { gzip: true }), 'x'.repeat(50_000))
  await files.write(`${dir}/empty`, '')
  assert.equal(await files.read(`${dir}/empty`), '')
})

test('many files, metadata', async () => {
  const { files } = it.sandbox
  const dir = await place(it.sandbox)
  const infos = await files.write([0, 1, 2].map((n) => ({ path: `${dir}/d${n}/f`, data: `${n}` })))
  assert.deepEqual(infos, [0, 1, 2].map((n) => written('f', `${dir}/d${n}/f`)))
  assert.equal(await files.read(`${dir}/d1/f`), '1')
  const info = await files.write(`${dir}/m`, '1', { metadata: { Author: 'x' } })
  assert.deepEqual(info.metadata, { author: 'x' })
  assert.deepEqual((await files.getInfo(`${dir}/m`)).metadata, { author: 'x' })
  await files.write(`${dir}/m`, '2')
  assert.equal((await files.getInfo(`${dir}/m`)).metadata, undefined)
})

test('list, info, rename, remove', async () => {
  const { files, commands } = it.sandbox
  const dir = await place(it.sandbox)
  assert.equal(await files.makeDir(`${dir}/b/x`), true)
  assert.equal(await files.makeDir(`${dir}/b/x`), false)
  await files.write(`${dir}/b/2`, '12345')
  await files.write(`${dir}/a`, '')
  const paths = (await files.list(dir, { depth: 3 })).map((e) => e.path.slice(dir.length + 1))
  assert.deepEqual(paths, ['a', 'b', 'b/2', 'b/x'])
  await assert.rejects(files.list(dir, { depth: 0 }), InvalidArgumentError)
  const info = await files.getInfo(`${dir}/b/2`)
  assert.equal(info.size, 5)
  assert.equal(info.type, FileType.FILE)
  assert.equal(info.mode, 0o644)
  assert.equal(info.permissions, '-rw-r--r--')
  assert.equal(info.owner, 'user')
  assert.ok(Math.abs(info.modifiedTime - Date.now()) < 10_000)
  await commands.run('ln -s b/2 link', { cwd: dir })
  assert.equal((await files.getInfo(`${dir}/link`)).symlinkTarget, `${dir}/b/2`)
  assert.equal((await files.rename(`${dir}/a`, `${dir}/new/c`)).path, `${dir}/new/c`)
  assert.equal(await files.exists(`${dir}/a`), false)
  assert.equal(await files.exists(`${dir}/new/c`), true)
  await files.remove(`${dir}/b`)
  assert.equal(await files.exists(`${dir}/b`), false)
  for (const name of ['read', 'getInfo', 'list']) {
    await assert.rejects(files[name](`${dir}/none`), FileNotFoundError)
  }
})

test('a large file', async () => {
  const { files, commands } = it.sandbox
  const dir = await place(it.sandbox)
  const data = randomBytes(16 << 20)
  const digest = createHash('sha256').update(data).digest('hex')
  await files.write(`${dir}/large`, new Blob([data]))
  assert.equal((await commands.run('sha256sum < large', { cwd: dir })).stdout.split(' ')[0], digest)
  const down = await collected(await files.read(`${dir}/large`, { format: 'stream' }))
  assert.equal(createHash('sha256').update(down).digest('hex'), digest)
})

test('a watched directory', async () => {
  const { files } = it.sandbox
  const dir = await place(it.sandbox)
  const events = []
  const ended = []
  const handle = await files.watchDir(dir, (event) => { events.push([event.name, event.type]) }, {
    recursive: true,
    onExit: (error) => { ended.push(error) },
  })
  await files.write(`${dir}/f`, '1')
  await eventually(() => events.length >= 3)
  assert.deepEqual(events.slice(0, 3), [
    ['f', FilesystemEventType.CREATE],
    ['f', FilesystemEventType.CHMOD],
    ['f', FilesystemEventType.WRITE],
  ])
  await files.write(`${dir}/sub/g`, '1')
  await eventually(() => events.some(([name, type]) => name === 'sub/g' && type === FilesystemEventType.WRITE))
  await files.rename(`${dir}/f`, `${dir}/h`)
  await eventually(() => events.some(([name, type]) => name === 'f' && type === FilesystemEventType.RENAME))
  await handle.stop()
  // With what, is the SDK's own affair: it cuts the stream by itself.
  await eventually(() => ended.length === 1)
  const count = events.length
  await files.write(`${dir}/late`, '1')
  assert.equal(events.length, count)
  await assert.rejects(files.watchDir(`${dir}/none`, () => {}), FileNotFoundError)
})

test('signed URLs', async () => {
  const { sandbox } = it
  const dir = await place(sandbox)
  const form = new FormData()
  form.append('file', 'uploaded')
  const up = await fetch(await sandbox.uploadUrl(`${dir}/s`), { method: 'POST', body: form })
  assert.deepEqual(await up.json(), [{ name: 's', path: `${dir}/s`, type: 'file' }])
  const down = await fetch(await sandbox.downloadUrl(`${dir}/s`, { useSignatureExpiration: 60 }))
  assert.equal(down.status, 200)
  assert.equal(await down.text(), 'uploaded')
  const expired = await fetch(await sandbox.downloadUrl(`${dir}/s`, { useSignatureExpiration: -60 }))
  assert.equal(expired.status, 401)
  assert.deepEqual(await expired.json(), { code: 401, message: 'signature is already expired' })
  const root = new FormData()
  root.append('file', 'x')
  const asRoot = await fetch(await sandbox.uploadUrl('hello.txt', { user: 'root' }), { method: 'POST', body: root })
  assert.deepEqual(await asRoot.json(), [{ name: 'hello.txt', path: '/root/hello.txt', type: 'file' }])
})
